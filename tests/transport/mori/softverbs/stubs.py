"""Builds what the amd_mori wheel links to and a machine without ROCm and RDMA lacks.

Names, symbols and symbol versions are read from the wheel's own ELF tables, so a newer wheel needs no change unless it
calls something new while it loads.  What is written by hand in `hip.c` and `small.c` is left out; the rest of the HIP
and HSA calls fail with their "no device", quiet ones return 0, and any other aborts with its name.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).parent
SYSTEM: Final = re.compile(
    r"^(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux.*|libz|libssl|libcrypto)\.so"
)
STATUS: Final = {"libamdhip64": 100, "libhsa-runtime64": 0x1000}  # what a call returns that nobody wrote by hand
QUIET: Final = re.compile(
    r"AddDescriptors|OnShutdownRun|VerifyVersion|InitSCCImpl|D[012]Ev$|^__hip|^drm|^amdgpu|^numa|^mbind"
)
OWNERS: Final = (  # of C symbols without a version
    (re.compile(r"^(hip|__hip)"), "libamdhip64"),
    (re.compile(r"^hsa_"), "libhsa-runtime64"),
    (re.compile(r"^pci_"), "libpci"),
    (re.compile(r"^amdgpu_"), "libdrm_amdgpu"),
    (re.compile(r"^drm"), "libdrm."),
)
SOURCES: Final = {"libamdhip64": ["hip.c"]}
DEFINES: Final = {"libhsa-runtime64": ["-DLIB_HSA"], "libpci": ["-DLIB_PCI"]}
PCI_FUNCTIONS: Final = 8  # made-up devices of the software verbs


class Symbol(NamedTuple):
    """What the wheel imports."""

    name: str
    kind: str
    version: str


class Imports(NamedTuple):
    """Of all libraries of the wheel together."""

    sonames: list[str]  # libraries that must be made
    homes: dict[str, str]  # symbol version -> soname
    symbols: list[Symbol]


def readelf(*arguments: str | Path) -> str:
    """Output of readelf."""
    command = ["readelf", "-W", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_imports(wheel: Path) -> Imports:
    """What the libraries in the wheel's folder need from outside of it."""
    libraries = sorted(wheel.glob("*.so"))
    inside = {path.name for path in libraries}
    needed: set[str] = set()
    homes: dict[str, str] = {}
    defined: set[str] = set()
    wanted: dict[str, Symbol] = {}
    for path in libraries:
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*?)\]", readelf("-d", path)))
        for part in readelf("-V", path).split(" File: ")[1:]:
            homes |= dict.fromkeys(re.findall(r"Name: (\S+)", part), part.split()[0])
        for symbol, is_defined, is_weak in read_symbols(path):
            if is_defined:
                defined.add(symbol.name)
            elif not is_weak:
                wanted[symbol.name] = symbol
    foreign = [s for n, s in sorted(wanted.items()) if n not in defined and not n.startswith(("Py", "_Py", "__gmon"))]
    return Imports(sorted(n for n in needed if n not in inside and not SYSTEM.match(n)), homes, foreign)


def read_symbols(path: Path) -> list[tuple[Symbol, bool, bool]]:
    """Dynamic symbols with "is defined" and "is weak"."""
    found = []
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":"):
            name, _, version = fields[7].replace("@@", "@").partition("@")
            found.append((Symbol(name, fields[3], version), fields[6] != "UND", fields[4] == "WEAK"))
    return found


def assign(imports: Imports) -> dict[str, list[Symbol]]:
    """Soname -> symbols that it must define; what nobody claims goes to the C++ library of gRPC."""
    content: dict[str, list[Symbol]] = {soname: [] for soname in imports.sonames}
    rest = next((soname for soname in imports.sonames if soname.startswith("libgrpc++")), imports.sonames[0])
    for symbol in imports.symbols:
        if symbol.version:
            soname = imports.homes[symbol.version]
        else:
            stem = next((owner for pattern, owner in OWNERS if pattern.search(symbol.name)), None)
            soname = next((name for name in imports.sonames if stem and name.startswith(stem)), rest)
        if soname in content:
            content[soname].append(symbol)
    return content


def assembly(symbols: Sequence[Symbol], status: int | None, by_hand: set[str]) -> str:
    """Source of the generated symbols of one library."""
    lines = ["\t.text"]
    for symbol in symbols:
        name = symbol.name
        if name in by_hand:
            continue
        lines.append(f"\t.globl {name}")
        if symbol.kind == "OBJECT":
            lines += ["\t.data", "\t.balign 32", f"\t.type {name},@object", f"\t.size {name},512", f"{name}:"]
            lines += ["\t.zero 512", "\t.text"]
            continue
        lines += [f"\t.type {name},@function", f"{name}:"]
        if QUIET.search(name):
            lines += ["\txorl %eax,%eax", "\tret"]
        elif status is not None:
            lines += [f"\tmovl ${status},%eax", "\tret"]
        else:
            lines += [f"\tleaq .Ln_{name}(%rip),%rdi", "\tjmp stub_unexpected"]
            lines += ["\t.section .rodata", f'.Ln_{name}: .string "{name}"', "\t.text"]
    return "\n".join([*lines, '\t.section .note.GNU-stack,"",@progbits', ""])


def version_script(symbols: Sequence[Symbol]) -> str:
    """The linker's map: every symbol under the version that the wheel asks for."""
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol in symbols:
        versions[symbol.version].append(symbol.name)
    named = [v for v in sorted(versions) if v]
    if not named:
        return "{ global: *; };\n"
    return "".join(f"{v} {{\n global:\n" + "".join(f"  {n};\n" for n in versions[v]) + "};\n" for v in named)


def written_by_hand() -> set[str]:
    """Names of the functions in the C sources."""
    text = (HERE / "hip.c").read_text() + (HERE / "small.c").read_text()
    return set(re.findall(r"STUB\((\w+)", text))


def build(wheel: Path, out: Path, compiler: Sequence[str]) -> None:
    """Build every library into a folder.

    Args:
        wheel: folder of the package `mori`.
        out: made where it is missing.
        compiler: gcc and where it finds headers.
    """
    generated = out / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    command = [*compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    by_hand = written_by_hand()
    for soname, symbols in assign(read_imports(wheel)).items():
        stem = soname.split(".so")[0]
        source, script = generated / f"{soname}.s", generated / f"{soname}.map"
        source.write_text(assembly(symbols, STATUS.get(stem), by_hand))
        script.write_text(version_script(symbols))
        files = [HERE / "small.c", *(HERE / name for name in SOURCES.get(stem, [])), source]
        options = [
            "-DWITH_UNEXPECTED",
            *DEFINES.get(stem, []),
            f"-Wl,-soname,{soname}",
            f"-Wl,--version-script={script}",
        ]
        subprocess.run([*command, *options, "-o", str(out / soname), *map(str, files)], check=True)
    smi = ["-DLIB_ROCM_SMI", "-Wl,-soname,librocm_smi64.so.1", "-o", str(out / "librocm_smi64.so.1")]
    subprocess.run([*command, *smi, str(HERE / "small.c")], check=True)
    # The engine looks for libibverbs.so first: by soname, the first must be ours.
    verbs = ["-pthread", "-fvisibility=hidden", "-Wl,-soname,libibverbs.so", "-o", str(out / "libibverbs.so")]
    subprocess.run([*command, *verbs, *map(str, sorted(HERE.glob("verbs_*.c")))], check=True)
    for function in range(PCI_FUNCTIONS):  # where the made-up devices have their PCI addresses
        (out / "sysfs" / f"0000:01:00.{function}").mkdir(parents=True, exist_ok=True)
