"""torchtitan_clone: LLM pretraining from one TOML file, on a laptop's CPU or on a cluster."""

__version__ = "0.2.0"
