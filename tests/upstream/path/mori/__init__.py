"""A stand-in for AMD's package ``mori`` where its hardware is missing: what vLLM's connector uses of ``mori.io``."""
