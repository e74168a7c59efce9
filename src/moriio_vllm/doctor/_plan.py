"""What is to run on the machine: from `--kv-transfer-config`, or the default backend where there is none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs

from moriio_proto.errors import ConfigurationError
from moriio_transport.base import TransportError
from moriio_transport.registry import available_transports, load_transport
from moriio_vllm.config import ConnectorConfig, Ranks
from moriio_vllm.doctor._report import Level

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Plan"]


@attrs.frozen
class Plan:
    """A backend, and the checked configuration where one was given."""

    backend: str = "rdma"
    config: ConnectorConfig | None = None
    problem: str = ""  # why there is no configuration though one was given

    @classmethod
    def from_json(cls, text: str, ranks: Ranks, default_host: Callable[[], str]) -> Plan:
        """From the JSON that vLLM takes; what is wrong with it is kept as `problem`.

        Args:
            text: the value of `--kv-transfer-config`.
            ranks: sizes of the instance on this host.
            default_host: asked for the address where `host_ip` is not given.
        """
        try:
            given = json.loads(text)
            if not isinstance(given, dict):
                return cls(problem=f"{text!r}: expected a JSON object")
            extra = given.get("kv_connector_extra_config")
            if not isinstance(extra, dict):
                return cls(problem=f"kv_connector_extra_config={extra!r}: expected an object")
            config = ConnectorConfig.from_extra(
                extra,
                role=str(given.get("kv_role")),
                ranks=ranks,
                default_host=default_host,
                backends=available_transports(),
                options_of=lambda name: load_transport(name).options,
            )
        except json.JSONDecodeError as error:
            return cls(problem=f"no JSON: {error}")
        except (ConfigurationError, TransportError) as error:
            return cls(problem=str(error))
        return cls(backend=config.backend, config=config)

    def unless_needed(self, *backends: str) -> Level:
        """FAIL where one of these backends is to run, NOTE else."""
        return Level.FAIL if self.backend in backends else Level.NOTE
