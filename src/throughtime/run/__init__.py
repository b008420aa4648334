"""A training run on disk: its configuration, its data, its model, its folder."""
