"""What names an adapter: its content, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.engines.vllm.identity import fingerprint_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"weights")
    return tmp_path


def test_an_adapter_is_named_by_its_content(adapter: Path) -> None:
    before = fingerprint_adapter(str(adapter))
    (adapter / "notes.txt").write_text("no part of it")
    assert fingerprint_adapter(str(adapter)) == before
    (adapter / "adapter_model.bin").write_bytes(b"other weights")
    assert fingerprint_adapter(str(adapter)) != before


def test_an_adapter_is_read_once(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request must not read it on the scheduler's thread."""
    first = fingerprint_adapter(str(adapter))

    def fail(path: Path) -> bytes:
        raise AssertionError("it was read again")

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert fingerprint_adapter(str(adapter)) == first
