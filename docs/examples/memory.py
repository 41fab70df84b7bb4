"""One memory, two sides, many views: where the bytes are, and what is copied."""

import numpy as np

import blobmem as caffe

device = caffe.SimulatedDevice()  # counts allocations and copies, and keeps its bytes in host memory
memory = caffe.SyncedMemory(4096, device, name="example")
print(memory)  # nothing has touched it, so neither side has a byte
assert memory.cpu_capacity == memory.gpu_capacity == 0

# A write on the host makes the host the only side that has these bytes; a read on the device brings a copy.
memory.mutable_cpu_data()[:] = 7
memory.gpu_data()
print("copied to the device:", device.statistics.htod_bytes, "bytes")
assert memory.head == "synced"

# A view of a part. Writing it on the host leaves the rest of the device's copy right: 512 bytes go over, not 4096.
part = memory.view(1024, 512)
part.cpu_data("write")[:] = 9
print("the memory is now", memory.head)
memory.gpu_data()
print("copied to the device:", device.statistics.htod_bytes, "bytes")

# To overwrite is to promise that old bytes do not matter: nothing is copied at all.
copied = device.statistics.htod_bytes
part.cpu_data("overwrite")[:] = 1
part.gpu_data("overwrite")
assert device.statistics.htod_bytes == copied

# Blobs are views with a shape. Two may share a memory, and either may be reshaped; capacity grows when it is touched.
large, small = caffe.Blob(64, 3, device=device), caffe.Blob(8, 3, device=device)
small.share_data(large)
large.data[...] = np.arange(192).reshape(64, 3)
assert small.data[7, 2] == 23
small.reshape(128, 3)
small.data[127] = 5
assert large.data[63, 2] == 191 and large.data_view.memory is small.data_view.memory
