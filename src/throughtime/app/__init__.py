"""The application: a training run on disk, its report and the command line."""
