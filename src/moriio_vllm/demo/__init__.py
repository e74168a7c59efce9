"""A prefill and a decode ``vllm serve`` behind the real vllm-router on this machine, checked against a single server.

``python -m moriio_vllm.demo`` (``make demo``) runs it; the end-to-end tests are built from the same parts. From the
bottom up: ``guard`` (a process whose descendants end with us), ``ports``, ``process``, ``stack`` (the servers and the
router), ``client``, ``prompts``, ``baseline`` (what a single server answers) and ``report``.
"""
