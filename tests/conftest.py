"""Its place puts this directory on the import path: the tests share what is in `support`."""
