"""What is installed has a hash, but for torch's CPU build and rltrain itself."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(ROOT.glob("requirements-*.lock"))
INSTALLERS = [ROOT / "Makefile", *sorted((ROOT / "docker").glob("Dockerfile.*"))]
PIN = re.compile(r"^([\w.\-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)


def pins(lock: Path) -> dict[str, str]:
    return {name: version for name, version, _ in PIN.findall(lock.read_text())}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_pin_has_a_hash(lock: Path) -> None:
    text = lock.read_text()
    bare = [name for name, _, hashes in PIN.findall(text) if not hashes]
    assert bare == (["torch"] if lock.name == "requirements-cpu.lock" else [])
    assert len(PIN.findall(text)) == len(re.findall(r"^[\w.\-]+==", text, re.MULTILINE))


@pytest.mark.parametrize("file", INSTALLERS, ids=lambda path: path.name)
def test_what_is_installed_is_checked(file: Path) -> None:
    commands = re.sub(r"\\\n", " ", file.read_text())
    commands = "\n".join(line for line in commands.splitlines() if not line.startswith("#"))
    for command in re.findall(r"(?:pip install|\$\(PIP\)) [^&|;\n]+", commands):
        allowed = "--require-hashes" in command or re.search(r"(--editable|-e) \.", command)
        assert allowed or "torch" in command, f"{file.name}: {command}"


def test_kuberay_adds_to_the_gpu_image_and_changes_nothing() -> None:
    gpu, added = pins(ROOT / "requirements-gpu.lock"), pins(ROOT / "requirements-kuberay.lock")
    assert added and not set(gpu) & set(added)
    assert f"ray[default]=={gpu['ray']} needs" in (ROOT / "requirements-kuberay.lock").read_text()
