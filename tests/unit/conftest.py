"""Being here puts this directory on the import path, so that tests in subdirectories can use `tiny_policy`."""
