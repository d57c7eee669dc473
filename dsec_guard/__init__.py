"""dsec-guard: a hardened sandbox runtime with escape detection for LLM agents in training and evaluation."""

__version__ = "0.1.0"
