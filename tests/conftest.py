"""Makes the modules beside this file (such as `estimates`) importable from every test."""
