"""The download scripts with local files in place of their servers: downloads are checked, interrupted ones continue, and a missing
file is an error that leaves no file behind."""
import shutil
import pytest
from suite import ROOT, assert_refused, command, program

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl reads the stand-in's files, and is missing: sh dev/setup.sh")
NAMES = [f"edu_fineweb_{x}.bin" for x in ("train_000001", "train_000002", "val_000000")]


@pytest.fixture
def server(tmp_path):
    """A folder with shards of 5001 tokens each."""
    (tmp_path / "server").mkdir()
    (tmp_path / "text").write_bytes((ROOT / "dev/data/tokenize.c").read_bytes()[:5000])
    for name in NAMES: assert command([program("tokenize")], "--out", tmp_path / "server" / name, tmp_path / "text").status == 0
    return tmp_path / "server"


def download(server, script, *options, url=None):
    return command("sh", [ROOT / f"dev/data/{script}.sh"], *options, cwd=server.parent,
                   env={"BASE_URL": url or f"file://{server}", "TOKENIZE": ROOT / program("tokenize")})


def names(folder):
    return sorted(x.name for x in folder.iterdir())


def test_shards_arrive_once_and_an_interrupted_download_goes_on(server, tmp_path):
    assert download(server, "fineweb", "2 out").status == 0 and names(tmp_path / "out") == NAMES
    assert all((tmp_path / "out" / x).read_bytes() == (server / x).read_bytes() for x in NAMES)
    server.rename(tmp_path / "gone")
    assert download(server, "fineweb", "2 out").status == 0  # nothing is fetched again
    (tmp_path / "gone").rename(server)
    begun, whole = tmp_path / "out" / NAMES[0], server / NAMES[0]
    begun.unlink()
    begun.with_suffix(".bin.part").write_bytes(whole.read_bytes()[:3000])
    assert download(server, "fineweb",
                    "1 out").status == 0 and begun.read_bytes() == whole.read_bytes() and names(tmp_path / "out") == NAMES


@pytest.mark.parametrize("broken, patterns", [
    (lambda x: x[:3000], ["train_000002.bin is not what it should be", "5001 tokens", "3000 bytes"]),
    (lambda x: b"<html>\n", ["train_000002.bin is not what it should be", "not a token file"]),
    (None, ["cannot download .*train_000002.bin", "network"])], ids=["cut", "html", "missing"])
def test_a_shard_that_is_not_whole_is_refused(server, tmp_path, broken, patterns):
    shard = server / NAMES[1]
    shard.write_bytes(broken(shard.read_bytes())) if broken else shard.unlink()
    assert_refused(download(server, "fineweb", "2 out"), *patterns)
    assert names(tmp_path / "out") == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize("script, options, patterns, text", [
    ("fineweb", "many", ["from 1 to 1001"], b""), ("fineweb", "1002", ["from 1 to 1001"], b""),
    ("gpt2", "gpt3", ["must be gpt2, gpt2-medium"], b""),
    ("gpt2", "gpt2 out", ["vocab.json is not what it should be", "9 bytes"], b'{"!": 0}\n'),
    ("tinyshakespeare", "bytes out", ["input.txt is not what it should be", "1115394"], b"First Citizen:\n"),
    ("tinyshakespeare", "bytes out", ["its SHA-256 is"], bytes(1115394))],
    ids=["no_number", "too_many", "gpt3", "gpt2", "size", "sha_256"])
def test_files_must_have_their_sizes_and_checksums_and_options_a_meaning(server, tmp_path, script, options, patterns, text):
    for name in "vocab.json", "input.txt": (server / name).write_bytes(text)
    assert_refused(download(server, script, options), *patterns)
    assert not (tmp_path / "out").exists() or not names(tmp_path / "out")


def test_without_a_network_the_error_says_so(server):
    assert_refused(download(server, "gpt2", "gpt2 out", url="http://127.0.0.1:9"), "cannot download", "network")
