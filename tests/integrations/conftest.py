"""The S3 server of tests/cloud, for trainers that upload."""

from tests.cloud.conftest import owner, server, url

__all__ = ["owner", "server", "url"]
