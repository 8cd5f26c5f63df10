"""The command line ``kvpool``. Importing this package loads nothing; :mod:`kvpool.cli.main` holds the application."""
