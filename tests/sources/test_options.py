from blobmem.data.options import transform_param
from blobmem.proto import caffe_pb2
from blobmem.proto.text import parse_text


def merged(text):
    layer = parse_text(text, caffe_pb2.LayerParameter)
    return str(transform_param(layer, layer.image_data_param)).split()


def test_fields_of_either_place():
    text = 'image_data_param { scale: 2 mirror: true mean_file: "m" crop_size: 3 }'
    assert merged(text) == ["scale:", "2", "mirror:", "true", "crop_size:", "3", "mean_file:", '"m"']
    assert merged("transform_param { scale: 3 force_gray: true }") == ["scale:", "3", "force_gray:", "true"]


def test_transform_param_counts_where_both_state_a_field():
    assert merged("transform_param { mirror: false } image_data_param { mirror: true }") == ["mirror:", "false"]
    both = 'transform_param { mean_value: 7 } image_data_param { mean_file: "m" scale: 2 }'
    assert merged(both) == ["scale:", "2", "mean_value:", "7"]


def test_the_layers_message_stays_as_it_is():
    layer = parse_text("image_data_param { scale: 2 }", caffe_pb2.LayerParameter)
    transform_param(layer, layer.image_data_param).crop_size = 4
    assert not layer.HasField("transform_param")
