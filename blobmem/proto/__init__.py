"""Caffe's messages, whose schema is `proto/caffe.proto` at the top of the repository.

Their classes are in `caffe_pb2`, files in and out in `text`, old formats in `upgrade`, NumPy arrays in `arrays`.
"""
