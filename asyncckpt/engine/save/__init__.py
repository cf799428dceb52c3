"""One save, from the call to the files."""
