"""metal_marlin with CUDA tensors: GEMMs, the operator, modules, graphs, transformers.

The exact cases have weights, activations and sums that every kernel represents without rounding, so
that a result has one value. The others are for the formats: the conformance program checks the
rounding of kernels, these tests check that the right numbers reach them.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import metal_marlin as mm
import metal_marlin._torch_linear as mt
import numpy as np
import pytest
import torch
from metal_marlin import _core
from metal_marlin.torch import MarlinLinear, MarlinStack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "examples" / "tiny-qwen3-moe", ROOT / "tests" / "data" / "tiny-glm4-moe"]
CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = [f for f in mm.formats() if f not in ("bf16", "fp16", "fp32")]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns integers from -3 to 3: with FP4 weights, sums of thousands of terms stay exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def exact_linear(in_features: int = 256, out_features: int = 96, bias: bool = True) -> MarlinLinear:
    """Makes a layer on the CPU whose scales are 1, so that its weights are FP4 numbers."""
    generator = torch.Generator().manual_seed(1)
    shape = (out_features, in_features)
    values = torch.tensor(FP4)[torch.randint(0, len(FP4), shape, generator=generator)]
    values = values * (1 - 2 * torch.randint(0, 2, shape, generator=generator))
    values[:, ::32] = 6.0  # The largest value of every group.
    layer = torch.nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(values)
        if bias:
            layer.bias.copy_(integers(out_features, seed=2))
    module = MarlinLinear.from_linear(layer, "fp4_e2m1", 32)
    assert torch.equal(dense_of(module), values.T.double())
    return module


def dense_of(module: MarlinStack) -> torch.Tensor:
    """Returns float64 [in, out]: the weights as a dense matrix, from the core."""
    return torch.from_numpy(mm.dequantize(module.quantized())).double()


def expected(module: MarlinLinear, x: torch.Tensor) -> torch.Tensor:
    """Computes the GEMM in float64 on the host, rounded once to x's type."""
    want = x.detach().cpu().double() @ dense_of(module)
    if module.bias is not None:
        want = want + module.bias.detach().cpu().double()
    return want.to(x.dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / want.norm())


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 64, 130, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_products_are_equal_bit_for_bit(dtype: torch.dtype, rows: int) -> None:
    module = exact_linear().to(CUDA)
    x = integers(rows, 256, seed=rows).to(CUDA, dtype)
    got = module(x)
    assert got.device == CUDA and got.dtype == dtype
    assert torch.equal(got.cpu(), expected(module, x))


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_is_the_product_with_the_dequantized_weight(
    format: str, dtype: torch.dtype
) -> None:
    layer = torch.nn.Linear(192, 80)
    with torch.no_grad():
        layer.weight.copy_(random(80, 192, seed=3))
    module = MarlinLinear.from_linear(layer, format, 64).to(CUDA)
    for shape in ((2, 3, 192), (1, 192), (40, 192)):
        x = random(*shape, seed=4).to(CUDA, dtype)
        got = module(x)
        assert got.dtype == dtype and got.shape == (*shape[:-1], 80)
        assert relative_error(got, expected(module, x.double())) < 0.015


def test_odd_shapes() -> None:
    for k, n in ((33, 1), (96, 40), (100, 7), (257, 129)):
        layer = torch.nn.Linear(k, n)
        module = MarlinLinear.from_linear(layer, "nf3", 32).to(CUDA)
        for rows in (0, 1, 5, 33):
            x = random(rows, k, seed=rows)
            got = module(x.to(CUDA)).cpu()
            terms = x.double().abs() @ dense_of(module).abs()
            assert got.shape == (rows, n)
            assert ((got - expected(module, x)).abs() <= 0.02 * terms + 1e-5).all()


def test_strides() -> None:
    module = exact_linear().to(CUDA)
    wide = integers(6, 600, seed=5).to(CUDA, torch.bfloat16)
    stacked = integers(2, 4, 5, 256, seed=6).to(CUDA, torch.bfloat16)
    for x in (
        wide[:, 8:264],  # Strided rows.
        wide[:, 1:257],  # Rows that are not aligned to 16 bytes.
        wide[:, :512:2],  # Strided columns.
        integers(256, 6, seed=7).to(CUDA, torch.bfloat16).T,
        wide[:1, :256].expand(5, 256),
        wide[0, :256],
        stacked,
        stacked.transpose(0, 2),
        stacked[:, :, 0],
        stacked[:, :0],
    ):
        assert torch.equal(module(x).cpu(), expected(module, x))


def test_bias_of_another_type_and_no_bias() -> None:
    module = exact_linear().to(CUDA)
    x = integers(3, 256).to(CUDA, torch.bfloat16)
    want = expected(module, x)
    assert module.bias is not None and module.bias.dtype == torch.float32
    assert torch.equal(module(x).cpu(), want)
    assert torch.equal(module.half()(x).cpu(), want)
    plain = exact_linear(bias=False).to(CUDA)
    assert torch.equal(plain(x).cpu(), expected(plain, x))


def test_the_same_bits_every_time() -> None:
    module = MarlinLinear.from_linear(torch.nn.Linear(1024, 512), "nf4", 64).to(CUDA)
    for rows in (1, 4, 100):
        x = random(rows, 1024).to(CUDA, torch.float16)
        first = module(x)
        assert all(torch.equal(module(x), first) for _ in range(10))


# --- the operator -------------------------------------------------------------------------------


def test_opcheck() -> None:
    module = exact_linear(96, 40).to(CUDA)
    x = random(4, 96).to(CUDA).requires_grad_()
    bias = random(40).to(CUDA).requires_grad_()
    torch.library.opcheck(mt.linear, (x, bias, module.handle(), 0, 40))
    torch.library.opcheck(mt.linear, (x.detach(), None, module.handle(), 0, 40))
    grad = random(4, 40).to(CUDA)
    torch.library.opcheck(mt.linear_grad, (grad, module.handle(), 0, 96))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype) -> None:
    module = exact_linear()
    dense = dense_of(module)
    module = module.to(CUDA)
    x = integers(3, 5, 256).to(CUDA, dtype).requires_grad_()
    grad = integers(3, 5, 96, seed=8).to(CUDA, dtype)
    module(x).backward(grad)
    assert x.grad is not None and module.bias is not None and module.bias.grad is not None
    assert x.grad.device == CUDA and x.grad.dtype == dtype
    assert relative_error(x.grad, grad.cpu().double() @ dense.T) < 0.005
    assert torch.equal(module.bias.grad.cpu(), grad.float().sum((0, 1)).cpu())


def test_compile_without_graph_breaks() -> None:
    module = exact_linear().to(CUDA)
    x = integers(5, 256).to(CUDA, torch.bfloat16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))
    assert torch.equal(compiled(x[:3]), module(x[:3]))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_with_inductor(mode: str) -> None:
    pytest.importorskip("triton")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("inductor needs a C compiler")
    chain = torch.nn.Sequential(
        exact_linear(256, 256), torch.nn.ReLU(), exact_linear(256, 96)
    ).to(CUDA)
    compiled = torch.compile(chain, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(5):  # Graphs are captured at the second call and replayed later.
            x = integers(4, 256, seed=seed).to(CUDA)
            assert torch.equal(compiled(x).clone(), chain(x))


# --- streams and graphs -------------------------------------------------------------------------


def test_no_call_waits_for_the_device() -> None:
    module = exact_linear().to(CUDA)
    inputs = [integers(rows, 256).to(CUDA, dtype) for rows in (1, 200) for dtype in DTYPES]
    wants = [module(x) for x in inputs]
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4_000_000_000)  # Cycles: seconds, while the calls take milliseconds.
        got = [module(x) for x in inputs]
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y, want in zip(got, wants, strict=True))


@pytest.mark.parametrize("rows", [1, 64])
def test_work_is_on_the_current_stream(rows: int) -> None:
    module = exact_linear().to(CUDA)
    source = integers(rows, 256).to(CUDA)
    want = module(source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)
        x.copy_(source)  # On another stream the GEMM would read zeros.
        got = module(x)
    stream.synchronize()
    assert torch.equal(got, want)


def test_threads_with_streams_of_their_own() -> None:
    module = MarlinLinear.from_linear(torch.nn.Linear(512, 512), "fp4_e2m1", 32).to(CUDA)
    inputs = [random(rows, 512, seed=rows).to(CUDA) for rows in (1, 3, 20, 150)]
    wants = [module(x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            results = [module(inputs[i]) for _ in range(50)]
        stream.synchronize()
        if not all(torch.equal(y, wants[i]) for y in results):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_are_captured_and_replayed(dtype: torch.dtype, rows: int) -> None:
    chain = torch.nn.Sequential(
        exact_linear(256, 512), torch.nn.ReLU(), exact_linear(512, 64, bias=False)
    ).to(CUDA)
    x = random(rows, 256).to(CUDA, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            chain(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            y = chain(x)
        for seed in range(3):
            x.copy_(random(rows, 256, seed=seed).to(CUDA, dtype))
            graph.replay()
            assert torch.equal(y, chain(x))


def test_the_first_product_may_be_captured() -> None:
    """Moving the module prepared its weights; there was no earlier GEMM, and none allocates."""
    module = exact_linear(320, 48).to(CUDA)
    x = integers(2, 320).to(CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = module(x)
    graph.replay()
    assert torch.equal(y.cpu(), expected(module, x))


def test_weights_are_not_prepared_while_a_graph_is_captured() -> None:
    module = copy.deepcopy(exact_linear().to(CUDA))
    x = integers(2, 256).to(CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(mm.UnsupportedError, match="while a graph is captured"):
            module(x)
    graph.replay()
    assert torch.equal(y, x + 1)
    assert torch.equal(module(x).cpu(), expected(module, x))


# --- modules ------------------------------------------------------------------------------------


def test_moving_prepares_once_and_keeps_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    module = exact_linear()
    x = integers(3, 256)
    want, before = module(x), {k: v.clone() for k, v in module.state_dict().items()}
    calls: list[str] = []
    prepare = mt.prepare

    def counted(weights: Any, device: Any) -> Any:
        calls.append(device.name)
        return prepare(weights, device)

    monkeypatch.setattr(mt, "prepare", counted)
    count = len(mt.weights_of)
    assert module.to(CUDA) is module and module.device == CUDA
    assert module.bias is not None and module.bias.device == CUDA
    assert torch.equal(module(x.to(CUDA)).cpu(), want)
    module.cuda().to(CUDA).half().float()
    assert torch.equal(module(x.to(CUDA)).cpu(), want)
    assert calls == ["cuda:0"] and len(mt.weights_of) == count
    after = module.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(after[name].cpu(), value)
    module.cpu()
    assert torch.equal(module(x), want) and module.device == torch.device("cpu")
    assert calls == ["cuda:0", "cpu"] and len(mt.weights_of) == count


def test_the_stored_form_stays_in_the_host_s_memory() -> None:
    before = torch.cuda.memory_allocated()
    module = MarlinLinear(4096, 4096, bias=False).to(CUDA)
    assert module.qweight.device.type == "cpu"
    assert torch.cuda.memory_allocated() - before < 1 << 20


def test_copies_pickles_and_loading() -> None:
    module = exact_linear().to(CUDA)
    x = integers(2, 256).to(CUDA)
    want = module(x)
    other = MarlinLinear(256, 96, group_size=32).to(CUDA)
    other.load_state_dict(module.state_dict())
    assigned = MarlinLinear(256, 96, group_size=32)
    on_device = {name: value.to(CUDA) for name, value in module.state_dict().items()}
    assigned.load_state_dict(on_device, assign=True)
    made = MarlinLinear(256, 96, group_size=32, bias=True).to("meta").to_empty(device=CUDA)
    made.load_state_dict(module.state_dict())
    twin = pickle.loads(pickle.dumps(module))
    for same in (other, assigned, made, copy.deepcopy(module), twin):
        assert same.device == CUDA and same.qweight.device.type == "cpu"
        assert torch.equal(same(x), want)


def test_quantizing_a_layer_on_the_device() -> None:
    layer = torch.nn.Linear(128, 64).to(CUDA)
    module = MarlinLinear.from_linear(layer, "s4", 64)
    assert module.device == CUDA
    x = random(4, 128).to(CUDA)
    assert relative_error(module(x), expected(module, x)) < 0.015


# --- functions ----------------------------------------------------------------------------------


def test_devices() -> None:
    names = [info["name"] for info in mm.devices()]
    assert names[0] == "cpu" and "cuda:0" in names
    device = mm.Device("cuda")
    assert device.name == f"cuda:{torch.cuda.current_device()}"
    assert device.info["backend"] == "cuda"
    available = mm.kernels.names(device)
    assert "marlin_gemv_mma" in available
    for kernel in device.info["kernels"]:
        assert (kernel["name"] in available) == (kernel["reason"] == "")
    device.synchronize()
    device.synchronize(torch.cuda.Stream().cuda_stream)
    assert mm.open_device("cuda:0") is mm.open_device("cuda:0")
    with pytest.raises(mm.UnsupportedError, match="cuda:999: no CUDA device"):
        mm.Device("cuda:999")


def test_functions_take_tensors_of_the_device() -> None:
    from metal_marlin import linear

    weight = random(64, 24).to(CUDA)
    packed, scales = mm.pack_fp4_weights(weight, 32)
    assert packed.device == scales.device == CUDA
    dense = mm.unpack_weights(packed, scales, 32)
    assert dense.device == CUDA
    x = random(2, 64).to(CUDA)
    count = len(linear._prepared)
    y = mm.quantized_linear(x, packed, scales, 32)
    assert torch.equal(mm.quantized_linear(x, packed, scales, 32), y)
    assert len(linear._prepared) == count + 1
    on_host = mm.quantized_linear(x.cpu(), packed, scales, 32)
    assert len(linear._prepared) == count + 2
    assert y.device == CUDA and on_host.device.type == "cpu"
    want = x.cpu().double() @ dense.cpu().double()
    assert relative_error(y, want) < 0.015 and relative_error(on_host, want) < 0.015
    del packed, scales
    assert len(linear._prepared) == count


def test_matmul_and_its_options() -> None:
    weights = mm.pack_weights(random(128, 64, seed=1), "nf4", 32)
    dense = torch.from_numpy(mm.dequantize(weights)).double()
    ready = mm.prepare(weights, "cuda:0")
    assert ready.device.name == "cuda:0"
    x, bias = random(5, 128).to(CUDA), random(64, seed=2).to(CUDA)
    want = x.cpu().double() @ dense
    exact = mm.matmul(x, ready, accuracy="exact")
    assert relative_error(exact, want) < 1e-5
    full = mm.matmul(x, ready, bias, activation="relu", batch_invariant=True)
    assert relative_error(full, torch.relu(want + bias.cpu())) < 0.015
    gated = mm.matmul(x, ready, activation="silu", gated=True)
    half = torch.nn.functional.silu(want[:, :32]) * want[:, 32:]
    assert gated.shape == (5, 32) and relative_error(gated, half) < 0.02
    one = mm.kernels.marlin_gemm_cuda_exact(x, ready)
    assert torch.equal(one, exact)


def test_kernels_by_name() -> None:
    kernels = ("marlin_gemm_fp4", "marlin_gemm_fp4_single_stage", "marlin_gemm_fp4_striped")
    x = random(9, 640).to(CUDA, torch.bfloat16)
    for format, names in (
        ("fp4_e2m1", (*kernels, "marlin_gemm_fused_fp4", "marlin_gemm_w4")),
        ("u4", ("marlin_gemm_fused_u4", "marlin_gemm_w4")),
    ):
        weights = mm.pack_weights(random(640, 96, seed=1), format, 32)
        want = x.cpu().double() @ torch.from_numpy(mm.dequantize(weights)).double()
        for name in names:
            ready = mm.prepare(weights, "cuda:0", marlin_w4=name == "marlin_gemm_w4")
            got = getattr(mm.kernels, name)(x, ready)
            assert got.device == CUDA and relative_error(got, want) < 0.015
    with pytest.raises(mm.UnsupportedError, match="takes fp4_e2m1 alone"):
        mm.kernels.marlin_gemm_fp4(x, mm.prepare(weights, "cuda:0"))


def test_a_stream_by_its_handle() -> None:
    weights = exact_linear(bias=False).quantized()
    ready = mm.prepare(weights, mm.Device("cuda:0"))
    source = integers(4, 256).to(CUDA)
    want = mm.matmul(source, ready)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros_like(source)
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
    got = mm.matmul(x, ready, stream=stream.cuda_stream)
    ready.device.synchronize(stream.cuda_stream)
    assert torch.equal(got, want)


@pytest.mark.parametrize("stream_of", ["default", "side"])
def test_the_core_takes_dlpack(stream_of: str) -> None:
    """Inputs of other frameworks: tensors by DLPack alone, the library's own workspace."""
    module = exact_linear(bias=False)
    ready = mm.prepare(module.quantized(), "cuda:0")
    x = integers(3, 256).to(CUDA)
    out = torch.empty(3, 96, device=CUDA)
    bias = integers(96, seed=3).to(CUDA)
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if stream_of == "default" else torch.cuda.Stream()
    options = _core.ProductOptions()
    options.bias, options.stream = bias, stream.cuda_stream
    _core.gemm(ready.device, x, ready, out, options)
    ready.device.synchronize(stream.cuda_stream)
    want = x.cpu().double() @ dense_of(module) + bias.cpu().double()
    assert torch.equal(out.cpu().double(), want)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    module = exact_linear(bias=False)
    ready = mm.prepare(module.quantized(), "cuda:0")
    x = cupy.asarray(integers(3, 256).numpy())
    y = mm.matmul(x, ready)
    assert isinstance(y, cupy.ndarray)
    want = integers(3, 256).double() @ dense_of(module)
    assert np.array_equal(y.get(), want.numpy())


# --- errors -------------------------------------------------------------------------------------


def test_errors_of_modules() -> None:
    module = exact_linear()
    x = integers(2, 256)
    with pytest.raises(mm.InvalidArgumentError, match="x: on cuda:0, but the weights are on cpu"):
        module(x.to(CUDA))
    module.to(CUDA)
    with pytest.raises(mm.InvalidArgumentError, match="x: on cpu, but the weights are on cuda:0"):
        module(x)
    with pytest.raises(mm.InvalidArgumentError, match=r"expected \[\.\.\., 256\]"):
        module(torch.zeros(2, 255, device=CUDA))
    with pytest.raises(mm.InvalidArgumentError, match="expected float32, float16 or bfloat16"):
        module(torch.zeros(2, 256, device=CUDA, dtype=torch.float64))
    stale = module.handle()
    module.cpu()
    with pytest.raises(mm.InvalidArgumentError, match="is not valid; its module was moved"):
        mt.linear(x.to(CUDA), None, stale, 0, 96)


def test_errors_of_products() -> None:
    weights = exact_linear(bias=False).quantized()
    on_host, on_device = mm.prepare(weights), mm.prepare(weights, "cuda:0")
    x = integers(2, 256)
    with pytest.raises(mm.InvalidArgumentError, match="x: expected an array on cuda:0, got"):
        mm.matmul(x, on_device)
    with pytest.raises(mm.InvalidArgumentError, match="x: expected an array on cuda:0, got"):
        mm.matmul(x.numpy(), on_device)
    with pytest.raises(mm.InvalidArgumentError, match="x: expected an array on cpu, got one on"):
        mm.matmul(x.to(CUDA), on_host)
    with pytest.raises(mm.InvalidArgumentError, match="bias: expected an array on cuda:0"):
        mm.matmul(x.to(CUDA), on_device, torch.zeros(96))
    with pytest.raises(mm.InvalidArgumentError, match="weights: prepared for another device"):
        mm.matmul(x, on_device, device=mm.default_device())
    shifted = torch.zeros(2 * 256 * 4 + 2, dtype=torch.uint8, device=CUDA)
    view = _core.ArrayView(
        shifted, shifted.data_ptr() + 2, "float32", (2, 256), (256, 1), "cuda", 0
    )
    out = torch.empty(2, 96, device=CUDA)
    with pytest.raises(mm.InvalidArgumentError, match="x: data is not aligned"):
        _core.gemm(on_device.device, view, on_device, out, _core.ProductOptions())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_the_second_device() -> None:
    module = exact_linear()
    other = torch.device("cuda", 1)
    module = module.to(other)
    x = integers(4, 256)
    want = expected(module, x)
    assert module.device == other
    assert torch.equal(module(x.to(other)).cpu(), want)  # The current device is the first.
    with pytest.raises(mm.InvalidArgumentError, match="on cuda:0, but the weights are on cuda:1"):
        module(x.to(CUDA))
    assert torch.equal(module.to(CUDA)(x.to(CUDA)).cpu(), want)
    ready = mm.prepare(module.quantized(), "cuda:1")
    with pytest.raises(mm.InvalidArgumentError, match="expected an array on cuda:1, got .* cuda:0"):
        mm.matmul(x.to(CUDA), ready)


# --- transformers -------------------------------------------------------------------------------


def greedy_alike(got: list[int], prompt: list[int], reference: mm.Model, slack: float) -> None:
    """Expects equal tokens up to one where the reference's two best logits nearly tie."""
    want = reference.generate(prompt, len(got))["token_ids"]
    for i, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        if ours != theirs:
            logits = reference.logits(prompt + want[:i])[-1]
            assert logits[theirs] - logits[ours] < slack, f"token {i}: {ours}, expected {theirs}"
            return
    assert len(got) == len(want)


@pytest.mark.parametrize("source", MODELS, ids=lambda p: p.name)
def test_models_run_on_the_gpu(source: Path) -> None:
    prompt = json.loads((source / "golden.json").read_text())["prompt_ids"]
    want = mm.load(source, "cpu", exact=True).logits(prompt)
    model = mm.load(source, "cuda", exact=True)
    assert str(model.device).startswith("cuda")
    for _ in range(3):  # The second call is recorded, the third is its replay.
        assert abs(model.logits(prompt) - want).max() < 1e-3


@pytest.mark.parametrize("source", MODELS, ids=lambda p: p.name)
@pytest.mark.parametrize("recipe", ["default_moe", "uniform:nf3/g64"])
@pytest.mark.parametrize("how", ["device_map", "to"])
def test_transformers_generates_what_the_runner_does(
    source: Path, recipe: str, how: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    import metal_marlin.transformers  # noqa: F401

    if how == "device_map":
        pytest.importorskip("accelerate")
    mm.quantize_model(source, tmp_path / "q", recipe)
    load = transformers.AutoModelForCausalLM.from_pretrained
    if how == "device_map":
        model = load(tmp_path / "q", dtype=torch.float32, device_map="cuda")
    else:
        model = load(tmp_path / "q", dtype=torch.float32).to("cuda")
    stacks = [module for module in model.modules() if isinstance(module, MarlinStack)]
    assert stacks and all(stack.device == CUDA for stack in stacks)
    assert all(stack.qweight.device.type == "cpu" for stack in stacks)
    prompt = json.loads((source / "golden.json").read_text())["prompt_ids"]
    tokens = torch.tensor([prompt], device=CUDA)
    out = model.generate(tokens, max_new_tokens=32, do_sample=False)
    got = out[0, len(prompt) :].tolist()
    reference = mm.load(tmp_path / "q", exact=True)
    greedy_alike(got, prompt, reference, slack=0.1)
    model.save_pretrained(tmp_path / "again")
    again = mm.load(tmp_path / "again", exact=True)
    assert again.generate(prompt, 32)["token_ids"] == reference.generate(prompt, 32)["token_ids"]
