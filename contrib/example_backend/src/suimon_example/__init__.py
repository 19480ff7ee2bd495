"""An example of a backend for Suimon, to copy. The plugin is ``suimon_example.backend``."""
