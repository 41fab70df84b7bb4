"""HDF5 files as other programs make them: Caffe, through HDF5's C calls, and people with bad intentions."""

import h5py
import numpy as np


def put_number(group, name, value):
    """A whole number as H5LTmake_dataset_int writes it: one axis, 32 bits."""
    group.create_dataset(name, data=np.array([value], np.int32))


def put_text(group, name, text):
    """A string as H5LTmake_dataset_string writes it: no axis, C's type, as long as the string and its 0."""
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(text) + 1)
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    space = h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(group.id, name.encode(), kind, space)
    dataset.write(space, space, np.array(text.encode(), f"S{len(text) + 1}"), mtype=kind)


def write_state(path, iteration, current_step, history, learned_net=None):
    """A solverstate.h5 as Caffe writes it."""
    with h5py.File(path, "w") as file:
        put_number(file, "iter", iteration)
        if learned_net is not None:
            put_text(file, "learned_net", str(learned_net))
        put_number(file, "current_step", current_step)
        group = file.create_group("history")
        for index, array in enumerate(history):
            group.create_dataset(str(index), data=array)


def _external_link(group, name, shape, folder):
    with h5py.File(folder / "elsewhere.h5", "w") as other:
        other["values"] = np.zeros(shape, np.float32)
    group[name] = h5py.ExternalLink(str(folder / "elsewhere.h5"), "/values")


def _soft_link(group, name, shape, folder):
    group.file["values"] = np.zeros(shape, np.float32)
    group[name] = h5py.SoftLink("/values")


def _values_elsewhere(group, name, shape, folder):
    secret = folder / "secret"
    secret.write_bytes(bytes(4 * int(np.prod(shape))))
    group.create_dataset(name, shape, np.float32, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def _virtual(group, name, shape, folder):
    layout = h5py.VirtualLayout(shape, np.float32)
    layout[...] = h5py.VirtualSource(str(folder / "elsewhere.h5"), "values", shape)
    group.create_virtual_dataset(name, layout)


def _huge_without_data(group, name, shape, folder):
    group.create_dataset(name, (2**40, *shape), np.float32)


def _huge_chunks_without_data(group, name, shape, folder):
    wide = (2**40,) * len(shape)
    group.create_dataset(
        name, shape, np.float32, maxshape=(None,) * len(shape), chunks=(2**29,) + (1,) * (len(wide) - 1)
    )


def _without_data(group, name, shape, folder):
    group.create_dataset(name, shape, np.float32)


def _part_of_the_data(group, name, shape, folder):
    dataset = group.create_dataset(name, shape, np.float32, chunks=(1, *shape[1:]), compression="gzip")
    dataset[0] = 1


def _part_of_the_chunks(group, name, shape, folder):
    dataset = group.create_dataset(name, shape, np.float32, chunks=(1, *shape[1:]))
    dataset[0] = 1


def _empty(group, name, shape, folder):
    group[name] = h5py.Empty(np.float32)


def _strings(group, name, shape, folder):
    group[name] = np.full(shape, b"1.5")


def _complex(group, name, shape, folder):
    group[name] = np.zeros(shape, np.complex64)


def _records(group, name, shape, folder):
    group[name] = np.zeros(shape, [("x", np.float32)])


def _references(group, name, shape, folder):
    group.create_dataset(name, shape, h5py.ref_dtype)


def _lists(group, name, shape, folder):
    group.create_dataset(name, shape, h5py.vlen_dtype(np.float32))


def _booleans(group, name, shape, folder):
    group[name] = np.zeros(shape, bool)


def _group(group, name, shape, folder):
    group.create_group(name)["deeper"] = 1


def _named_type(group, name, shape, folder):
    group[name] = np.dtype(np.float32)


def _another_shape(group, name, shape, folder):
    group[name] = np.zeros((*shape, 2), np.float32)


def _transposed(group, name, shape, folder):
    group[name] = np.zeros(shape[::-1] if len(set(shape)) > 1 else (*shape, 1), np.float32)


HOSTILE = {
    "external link": (_external_link, "link to another place"),
    "soft link": (_soft_link, "link to another place"),
    "external values": (_values_elsewhere, "values in other files"),
    "virtual": (_virtual, "values in other files"),
    "huge": (_huge_without_data, r"shape \(1099511627776, "),
    "huge chunks": (_huge_chunks_without_data, "in chunks of 2147483648 bytes"),
    "no data": (_without_data, "not all of its values: 0 bytes"),
    "some chunks": (_part_of_the_chunks, "not all of its values"),
    "some compressed": (_part_of_the_data, "not all of its values"),
    "empty": (_empty, "has no values"),
    "strings": (_strings, "another type, expected numbers"),
    "complex": (_complex, "another type, expected numbers"),
    "records": (_records, "another type, expected numbers"),
    "references": (_references, "another type, expected numbers"),
    "lists": (_lists, "another type, expected numbers"),
    "booleans": (_booleans, "another type, expected numbers"),
    "group": (_group, "is a group, expected an array"),
    "named type": (_named_type, "is a datatype, expected an array"),
    "another shape": (_another_shape, "has shape"),
    "transposed": (_transposed, "has shape"),
}
"""What may stand where an array of a shape is expected: (how to make it in a group, what the message says)."""


def replace_with(kind, path, dataset, folder):
    """Put something hostile in the place of a file's dataset; what the error has to say of it."""
    make, message = HOSTILE[kind]
    with h5py.File(path, "a") as file:
        shape = file[dataset].shape
        del file[dataset]
        place, name = f"/{dataset}".rsplit("/", 1)
        make(file[place or "/"], name, shape, folder)
    return message
