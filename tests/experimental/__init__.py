"""What has never met its real counterpart: two libraries by recorded shapes, two systems by simulation."""
