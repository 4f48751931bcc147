"""Copies of a step's arrays to the device and back, here on the CPU."""

from typing import Any

import numpy as np
import torch

from ktqueue.operators.gpu.staging import FixedStaging, ResultFetcher, Staging


def test_staged_arrays_arrive_unchanged() -> None:
    staging = Staging("cpu")
    noise = np.random.default_rng(0)
    for size in (3, 40_000, 5):  # the second array does not fit the first buffer
        arrays: list[np.ndarray[Any, np.dtype[Any]]] = [
            noise.integers(0, 9, (2, size)),
            noise.normal(size=size).astype(np.float32),
            noise.integers(0, 9, 0),
            noise.integers(0, 9, (size, 3)).astype(np.int32),
            noise.normal(size=1),
        ]
        for array, staged in zip(arrays, staging.put(arrays), strict=True):
            assert staged.shape == array.shape and staged.numpy().dtype == array.dtype
            assert (staged.numpy() == array).all()


def test_fixed_arrays_never_move() -> None:
    staging = FixedStaging({"a": ((2, 3), np.int64), "b": ((5,), np.int32)}, "cpu")
    places = {name: tensor.data_ptr() for name, tensor in staging.device.items()}
    for value in (1, 2):
        staging.open()["a"][:] = value
        staging.arrays["b"][:] = -value
        assert not (staging.device["a"] == value).any(), "nothing has been sent yet"
        staging.send()
        assert (staging.device["a"] == value).all() and (staging.host["b"] == -value).all()
    assert places == {name: tensor.data_ptr() for name, tensor in staging.device.items()}


def test_only_a_part_of_the_last_array_may_be_sent() -> None:
    staging = FixedStaging({"a": ((3,), np.int64), "b": ((5,), np.int32)}, "cpu")
    staging.open()["a"][:] = 7
    staging.arrays["b"][:] = 8
    staging.send(2)
    assert staging.device["a"].tolist() == [7, 7, 7] and staging.device["b"].tolist() == [8, 8, 0, 0, 0]
    staging.write({"a": np.full(3, 5), "b": np.arange(3, dtype=np.int32)})
    assert staging.device["a"].tolist() == [5, 5, 5] and staging.device["b"].tolist() == [0, 1, 2, 0, 0]


def test_the_host_works_while_a_result_is_fetched() -> None:
    meanwhile = []
    assert ResultFetcher("cpu").fetch(torch.arange(4), lambda: meanwhile.append(1)).tolist() == [0, 1, 2, 3]
    assert meanwhile == [1]
