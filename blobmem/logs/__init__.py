"""Logs of training runs, `blobmem train`'s and Caffe's: reading them, and what to make of them.

`reading` takes lines of either kind apart, `record` is what they are put together to, `glog` knows Caffe's lines;
`tables` and `plot` write what was read.
"""
