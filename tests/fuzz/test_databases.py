"""Damaged LMDB and LevelDB databases, and damaged records in whole ones."""

import io
import os
import shutil
import struct

import numpy as np
import pytest
from mutations import damage_bytes, damage_header, damage_message
from PIL import Image
from strangers import fuzz, success_or_error

from blobmem import TRAIN, Net, NetError
from blobmem.data import batches
from blobmem.data.batches import BatchLoader, NotBytes
from blobmem.data.database import open_records
from blobmem.data.datum import RecordError, parse, unpack
from blobmem.data.transform import Transformer
from blobmem.data.writer import new_database
from blobmem.proto import caffe_pb2

_PIXELS = np.random.default_rng(0).integers(0, 256, (3, 6, 7), dtype=np.uint8)


def _records():
    """A record of each kind: bytes, floats, and a compressed image."""
    file = io.BytesIO()
    Image.fromarray(_PIXELS.transpose(1, 2, 0)).save(file, "PNG")
    shape = {"channels": 3, "height": 6, "width": 7}
    return [
        caffe_pb2.Datum(data=_PIXELS.tobytes(), label=1, **shape).SerializeToString(),
        caffe_pb2.Datum(float_data=_PIXELS.ravel().tolist(), label=2, **shape).SerializeToString(),
        caffe_pb2.Datum(data=file.getvalue(), encoded=True, label=3).SerializeToString(),
    ]


RECORDS = _records()


@fuzz(300)
def test_records(chance):
    damage = damage_message if chance.random() < 0.6 else damage_bytes
    with success_or_error(RecordError):
        shape, pixels = unpack(parse(damage(chance.choice(RECORDS), chance)), chance.choice((None, "color", "gray")))
        assert pixels().shape == shape


def _use(folder, chance):
    """Read a database's records, or a few batches of them, past its end too."""
    with success_or_error():
        records = open_records(folder)
        for _ in zip(range(min(len(records), 400)), records.items(chance.randrange(5)), strict=False):
            pass
    with success_or_error():
        source = f'data_param {{ source: "{folder}" batch_size: {chance.choice((1, 4))} prefetch: 1 }}'
        text = f'layer {{ name: "d" type: "Data" top: "x" top: "y" {source} }}'
        net = Net(text, TRAIN, skip_damaged=chance.random() < 0.5)
        for _ in range(5):
            net.run_forward()


@pytest.fixture(scope="module")
def lmdb(tmp_path_factory):
    """Files of databases: of one leaf, of many, and with values in pages of their own."""
    files = []
    for number, values in enumerate([RECORDS * 4, RECORDS[:1] * 300, [RECORDS[0], bytes(9000), RECORDS[0]]]):
        folder = tmp_path_factory.mktemp("lmdb") / str(number)
        with new_database(folder) as writer:
            for index, value in enumerate(values):
                writer.put(b"%08d" % index, value)
        files.append((folder / "data.mdb").read_bytes())
    return files


@fuzz(40)
def test_lmdb(chance, lmdb, tmp_path):
    data = chance.choice(lmdb)
    at = chance.randrange(len(data) // 4096) * 4096 + chance.choice((0, 0, chance.randrange(4096)))
    if chance.random() < 0.7:  # within a page's header or nodes, everything else in its place
        piece = damage_header(data[at : at + 64], chance)[:64].ljust(len(data[at : at + 64]), b"\0")
        data = data[:at] + piece + data[at + len(piece) :]
    else:
        data = damage_bytes(data, chance)
    (tmp_path / "data.mdb").write_bytes(data)
    _use(tmp_path, chance)


def _as_bytes(folder, position, count, skip):
    """What a batch of bytes is, or why there is none."""
    made = Transformer(caffe_pb2.TransformationParameter(), True, np.float32, NetError)
    data, cuts = np.zeros((count, 3, 6, 7), np.uint8), np.zeros((count, 3), np.int32)
    labels = np.zeros(count, np.int64)
    try:
        BatchLoader(str(folder), made, "d", "here", skip_damaged=skip).load(position, 1, data, labels, cuts)
    except (NetError, NotBytes) as error:
        return repr(error)
    return data.tobytes(), labels.tolist()


@fuzz(150)
def test_leaves_taken_at_once_are_what_their_records_are(chance, lmdb, tmp_path, monkeypatch):
    data = bytearray(chance.choice(lmdb[:2]))
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        at = 8192 + chance.randrange(len(data) // 4096 - 2) * 4096  # behind the meta data
        place = at + chance.choice((chance.randrange(32), 4095 - chance.randrange(400), chance.randrange(4096)))
        data[place] = chance.choice((0, 1, 2, 4, 16, 127, 128, 255, chance.randrange(256)))
    if chance.random() < 0.1:
        del data[chance.randrange(8192, len(data)) :]
    (tmp_path / "data.mdb").write_bytes(data)
    asked = tmp_path, chance.randrange(310), chance.choice((1, 40, 700)), chance.random() < 0.5
    found = _as_bytes(*asked)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "Records", type("Nobody", (), {}))
        assert _as_bytes(*asked) == found


def _with_meta(data, entries, depth, root):
    """An LMDB file whose meta data, in both places, say how many records there are, in how deep a tree."""
    result = bytearray(data)
    for start in (0, 4096):
        struct.pack_into("<H", result, start + 94, depth)
        struct.pack_into("<QQQ", result, start + 120, entries, root, len(data) // 4096 - 1)
    return bytes(result)


def test_more_records_than_there_is_place_for(lmdb, tmp_path):
    (tmp_path / "data.mdb").write_bytes(_with_meta(lmdb[0], 2**40, 1, 2))
    with pytest.raises(NetError, match="no place for 1099511627776 records"):
        open_records(tmp_path)


def test_a_tree_that_goes_through_the_same_pages_again_and_again(lmdb, tmp_path):
    pages = [struct.pack("<QHHHH", 2, 0, 2, 16, 4096).ljust(4096, b"\0")]  # a leaf without records
    for number in range(3, 20):  # and branches, each with 100 times the page before it
        offsets = [4096 - 8 * (place + 1) for place in range(100)]
        page = bytearray(struct.pack("<QHHHH", number, 0, 1, 16 + 200, offsets[-1]).ljust(4096, b"\0"))
        struct.pack_into("<100H", page, 16, *offsets)
        for offset in offsets:
            struct.pack_into("<HHHH", page, offset, number - 1, 0, 0, 0)
        pages.append(bytes(page))
    data = lmdb[0][:8192] + b"".join(pages)
    (tmp_path / "data.mdb").write_bytes(_with_meta(data, 5, len(pages), 19))
    with pytest.raises(NetError, match="leaf page 2 has no records"):
        open_records(tmp_path)


@pytest.fixture(scope="module")
def leveldb(tmp_path_factory):
    """A database with a table and a log."""
    plyvel = pytest.importorskip("plyvel", reason="plyvel, an optional extra, is not installed")
    folder = tmp_path_factory.mktemp("leveldb") / "db"
    database = plyvel.DB(str(folder), create_if_missing=True)
    for index, value in enumerate(RECORDS * 4):
        database.put(b"%08d" % index, value)
    database.compact_range()
    database.put(b"00000100", RECORDS[0])
    database.close()
    return folder


@fuzz(40)
def test_leveldb(chance, leveldb, tmp_path):
    folder = tmp_path / "db"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(leveldb, folder)
    names = sorted(name for name in os.listdir(folder) if not name.startswith("LO"))  # not the lock and the logs
    path = folder / chance.choice(names)
    if chance.random() < 0.05:
        path.unlink()
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), chance))
    _use(folder, chance)
