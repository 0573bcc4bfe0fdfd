import hashlib
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from potluck.control.identity import Identity
from potluck.errors import BadInput, SaveFailed


def test_an_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    first = Identity.load(tmp_path / "a")
    assert Identity.load(tmp_path / "a") == first
    assert Identity.load(tmp_path / "b").fingerprint != first.fingerprint
    der = ssl.PEM_cert_to_DER_cert(first.certificate.read_text())
    assert hashlib.sha256(der).digest() == first.fingerprint
    assert stat.S_IMODE(first.key.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate(first.certificate.read_bytes())
    assert certificate.not_valid_before_utc.year == 2000
    assert certificate.not_valid_after_utc.year == 2100


def test_it_lies_in_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Identity.load().key.parent == tmp_path / "potluck"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Identity.load().key.parent == tmp_path / "home" / ".local" / "share" / "potluck"


def test_processes_that_come_at_once_get_the_same(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from potluck.control.identity import Identity;"
        "print(Identity.load(Path(sys.argv[1])).fingerprint.hex())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "new")], stdout=subprocess.PIPE) for _ in range(3)
    ]
    assert len({process.communicate(timeout=60)[0] for process in processes}) == 1
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["certificate.pem", "key.pem", "lock"]


def test_damage_is_a_sentence(tmp_path: Path) -> None:
    identity = Identity.load(tmp_path / "a")
    identity.key.write_bytes(Identity.load(tmp_path / "b").key.read_bytes())
    with pytest.raises(BadInput, match="do not belong together"):
        Identity.load(tmp_path / "a")
    identity.certificate.write_text("nonsense")
    with pytest.raises(BadInput, match="is damaged: delete both"):
        Identity.load(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailed, match="identity cannot be kept"):
        Identity.load(tmp_path / "file")
