import gc
import weakref

import pytest
import torch

from lightning_mqgnn.buffers import BufferPool


def lend(pool, name="x", rows=10):
    return pool.lend(name, (rows, 4), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_loan_has_the_shape_and_dtype_asked_for(dtype):
    tensor = BufferPool().lend("x", (3, 5), dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), dtype, True)
    assert BufferPool().lend("x", (0, 5), dtype).shape == (0, 5)


def test_memory_is_used_again_once_nothing_refers_to_it():
    pool = BufferPool()
    for _ in range(50):
        lend(pool)
    assert pool.allocations == 1


def test_a_smaller_loan_fits_into_a_larger_buffer_and_a_larger_one_gets_a_new_one():
    pool = BufferPool()
    lend(pool, rows=100)
    lend(pool, rows=7)
    assert pool.allocations == 1
    lend(pool, rows=1000)
    assert pool.allocations == 2


def keep_tensor(tensor):
    return tensor


def keep_view(tensor):
    return tensor[2:5, 1]


def keep_numpy(tensor):
    return tensor.numpy()[3:]


def keep_storage(tensor):
    return tensor.untyped_storage()


def keep_autograd_graph(tensor):
    weight = torch.ones(4, 4, requires_grad=True)
    return (tensor @ weight).sum()


@pytest.mark.parametrize("keep", [keep_tensor, keep_view, keep_numpy, keep_storage, keep_autograd_graph])
def test_memory_is_not_used_again_while_anything_refers_to_it(keep):
    pool = BufferPool()
    tensor = lend(pool)
    address = tensor.data_ptr()
    kept = keep(tensor)
    del tensor
    assert lend(pool).data_ptr() != address
    del kept
    gc.collect()
    assert address in {loan.data_ptr() for loan in [lend(pool), lend(pool)]}


def test_names_do_not_share_buffers():
    pool = BufferPool()
    x = lend(pool, "x")
    y = lend(pool, "y")
    del x
    assert pool.allocations == 2
    assert lend(pool, "y").data_ptr() != y.data_ptr()
    assert pool.allocations == 3


def test_free_buffers_beyond_keep_are_given_back():
    pool = BufferPool(keep=2)
    loans = [lend(pool) for _ in range(5)]
    assert pool.allocations == 5
    del loans
    gc.collect()
    loans = [lend(pool) for _ in range(3)]
    assert len(loans) == 3
    assert pool.allocations == 6


def test_a_pool_is_freed_with_its_last_loan():
    pool = BufferPool()
    tensor = lend(pool)
    tensor.fill_(7)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert bool((tensor == 7).all())
