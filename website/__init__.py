"""What mkdocs needs to make the documentation site beside its own plugins; `make docs` uses it."""
