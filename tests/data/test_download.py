"""Downloads from a local server."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neuron_merging.reproduction import dataset_files, datasets
from neuron_merging.reproduction.datasets import load_dataset
from tests.data.tiny_datasets import IMAGES, LABELS, N, fashion_files, labels, pixels, refused, same


class Server(ThreadingHTTPServer):
    files: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    ranges = True
    cut = 0  # leave this many bytes unsent


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        content, wanted = self.server.files.get(self.path[1:]), self.headers["Range"]
        self.server.asked.append((self.path[1:], wanted))
        start = int(wanted[6:-1]) if wanted and self.server.ranges else 0
        if content is None or (start and start >= len(content)):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) - self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        running.files, running.asked = {"a.bin": CONTENT}, []
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


CONTENT = pixels((300_000,)).tobytes()
MD5 = hashlib.md5(CONTENT).hexdigest()


def url(server: Server, name: str = "") -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/{name}"


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_download_shows_progress_on_stderr(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset_files.download_file(url(server, "a.bin"), tmp_path / "new" / "a.bin", MD5)
    assert (tmp_path / "new" / "a.bin").read_bytes() == CONTENT
    assert left(tmp_path / "new") == ["a.bin"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "a.bin" in err
    assert "300" in err


def test_download_resumes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:100_000])
    dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert server.asked == [("a.bin", "bytes=100000-")]
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert left(tmp_path) == ["a.bin"]


def test_download_starts_again_where_the_server_knows_no_ranges(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"old" * 1000)
    dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert left(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("part", [b"", b"stale" * 100, CONTENT + b"more"])
def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path, part: bytes) -> None:
    server.files["a.bin"] = CONTENT if part else CONTENT[::-1]
    if part:
        (tmp_path / "a.bin.part").write_bytes(part)
    refused(lambda: dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5), "md5", MD5)
    assert left(tmp_path) == []


def test_a_broken_connection_keeps_the_part_for_the_next_time(server: Server, tmp_path: Path) -> None:
    server.cut = 1000
    refused(lambda: dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5), "a.bin", "again")
    assert left(tmp_path) == ["a.bin.part"]
    server.cut = 0
    dataset_files.download_file(url(server, "a.bin"), tmp_path / "a.bin", MD5)
    assert server.asked[1] == ("a.bin", "bytes=299000-")
    assert left(tmp_path) == ["a.bin"]


def test_two_downloads_of_one_file_take_turns(server: Server, tmp_path: Path) -> None:
    fetch = functools.partial(dataset_files.download_file, url(server, "a.bin"), tmp_path / "a.bin", MD5)
    with ThreadPoolExecutor(4) as pool:
        for task in [pool.submit(fetch) for _ in range(4)]:
            task.result()
    assert server.asked == [("a.bin", None)]
    assert left(tmp_path) == ["a.bin"]


def test_no_such_file_no_server_no_folder(server: Server, tmp_path: Path) -> None:
    refused(lambda: dataset_files.download_file(url(server, "b.bin"), tmp_path / "b.bin", MD5), "404", "b.bin")
    refused(lambda: dataset_files.download_file("http://127.0.0.1:9/a", tmp_path / "a", MD5), "127.0.0.1:9")
    (tmp_path / "file").write_text("in the way")
    refused(lambda: dataset_files.download_file(url(server, "a.bin"), tmp_path / "file" / "a.bin", MD5), "root")


def test_load_downloads_only_when_allowed_and_only_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files |= {f"{k}.gz": gzip.compress(v, mtime=0) for k, v in fashion_files().items()}
    for name, content in server.files.items():
        monkeypatch.setitem(datasets.MD5_SUMS, name, hashlib.md5(content).hexdigest())
    spec = dataclasses.replace(datasets.DATASET_SPECS["fashion-mnist"], url=url(server))
    monkeypatch.setitem(datasets.DATASET_SPECS, "fashion-mnist", spec)
    refused(lambda: load_dataset("fashion-mnist", root=tmp_path), "download=True")
    assert server.asked == []
    for _ in range(2):
        images = load_dataset("fashion-mnist", root=tmp_path, download=True)
        assert same(images, pixels((N, 28, 28))[:, None], labels())
    assert [name for name, _ in server.asked] == [f"{IMAGES}.gz", f"{LABELS}.gz"]
