"""metal_marlin.torch: mixture of experts, on the CPU and, where there is one, on a GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import metal_marlin as mm
import numpy as np
import pytest
import torch
from metal_marlin import _core
from metal_marlin._torch_experts import experts_grad, layers
from metal_marlin.torch import (
    KeptMatrix,
    MarlinExperts,
    MarlinLinear,
    MarlinMoE,
    MarlinStack,
    PreparedExperts,
    experts,
    moe,
)
from torch import nn

HIDDEN, INNER, EXPERTS, TOP_K = 64, 48, 6, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GPU = torch.cuda.is_available()
on_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device")
# Tolerances: rounding to the type of x at default accuracy, and exact float32 GEMMs.
ROUNDED = {torch.float32: 0.006, torch.bfloat16: 0.02, torch.float16: 0.006}
EXACT = 2e-6


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class MLP(nn.Module):
    """An expert as models write it."""

    def __init__(self, seed: int, bias: bool = False, inner: int = INNER) -> None:
        super().__init__()
        shapes = {"gate_proj": (HIDDEN, inner), "up_proj": (HIDDEN, inner),
                  "down_proj": (inner, HIDDEN)}
        for i, (name, (k, n)) in enumerate(shapes.items()):
            linear = nn.Linear(k, n, bias=bias)
            with torch.no_grad():
                linear.weight.copy_(random(n, k, seed=100 * seed + i) / k**0.5)
                if bias:
                    linear.bias.copy_(random(n, seed=100 * seed + 10 + i))
            self.add_module(name, linear)


def mlps(bias: bool = False) -> list[MLP]:
    return [MLP(1 + expert, bias) for expert in range(EXPERTS)]


def dense(linear: Any) -> torch.Tensor:
    """Returns float64 [in, out]: the matrix that a module multiplies by."""
    if isinstance(linear, MarlinStack):
        return torch.from_numpy(mm.dequantize(linear.quantized())).double().cpu()
    weight = linear.kept if isinstance(linear, KeptMatrix) else linear.weight
    return weight.detach().double().cpu().T


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(gate) * up


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


Matrices = list[tuple[torch.Tensor, ...]]


def one_expert(x: torch.Tensor, parts: tuple[torch.Tensor, ...], gate: Any) -> torch.Tensor:
    """parts: gate, up, down, and their biases if there are any."""
    biases = [*parts[3:], 0, 0, 0][:3]
    inner = gate(x @ parts[0] + biases[0], x @ parts[1] + biases[1])
    return inner @ parts[2] + biases[2]


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices: Matrices, gate: Any = silu
) -> torch.Tensor:
    """Computes the layer in double precision on the host."""
    rows = x.detach().cpu().double().reshape(-1, x.shape[-1])
    chosen, factors = (one.detach().cpu().flatten(0, -2) for one in (ids, weights.double()))
    out = torch.zeros_like(rows)
    for token, expert_ids in enumerate(chosen.tolist()):
        for slot, expert in enumerate(expert_ids):
            part = one_expert(rows[token], matrices[expert], gate)
            out[token] += factors[token, slot] * part
    return out.reshape(x.shape)


def matrices_of(module: MarlinExperts) -> Matrices:
    """The matrices of experts that are stored one by one."""
    found = []
    for expert in range(module.experts):
        own = module.get_submodule(str(expert))
        parts = [dense(getattr(own, name)) for name in module.names]
        for name in module.names:
            bias = getattr(module, f"{name}_bias")
            if bias is not None:
                parts.append(bias[expert].double().cpu())
        found.append(tuple(parts))
    return found


def routed(tokens: int, device: torch.device, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.softmax(random(tokens, EXPERTS, seed=seed), -1)
    weights, ids = torch.topk(scores, TOP_K)
    return ids.to(device), weights.to(device)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def made(device: torch.device, **options: Any) -> MarlinExperts:
    return MarlinExperts.from_modules(mlps(), group_size=32, **options).to(device)


def router(seed: int = 9) -> nn.Linear:
    linear = nn.Linear(HIDDEN, EXPERTS, bias=False)
    with torch.no_grad():
        linear.weight.copy_(random(EXPERTS, HIDDEN, seed=seed))
    return linear


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_agree_with_double_precision(
    dtype: torch.dtype, tokens: int, device: torch.device
) -> None:
    module = made(device)
    x = random(tokens, HIDDEN).to(device, dtype)
    ids, weights = routed(tokens, device)
    got = module(x, ids, weights)
    assert got.dtype == dtype and got.shape == x.shape and got.device == x.device
    assert relative(got, reference(x, ids, weights, matrices_of(module))) < ROUNDED[dtype]
    assert torch.equal(got, module(x, ids.int(), weights.double()))


def test_exact_experts_of_several_formats(device: torch.device) -> None:
    formats = ["fp4_e2m1", "u4", "nf3", "s8", "bf16", "fp32"]
    module = MarlinExperts.from_modules(
        mlps(), format=formats, group_size=[32, 16, 32, 16, 0, 0], accuracy="exact"
    ).to(device)
    kinds = [type(module.get_submodule(f"{i}.gate_proj")) for i in range(EXPERTS)]
    assert kinds == [MarlinStack] * 4 + [KeptMatrix] * 2
    x = random(20, HIDDEN).to(device)
    ids, weights = routed(20, device)
    assert len(ids.unique()) == EXPERTS
    want = reference(x, ids, weights, matrices_of(module))
    assert relative(module(x, ids, weights), want) < EXACT


def test_biases_and_other_activations(device: torch.device) -> None:
    x = random(9, HIDDEN).to(device)
    ids, weights = routed(9, device)
    gates: dict[str, Callable[..., torch.Tensor]] = {
        "gelu_tanh": lambda g, u: nn.functional.gelu(g, approximate="tanh") * u,
        "relu": lambda g, u: g.relu() * u,
        "none": lambda g, u: g * u,
    }
    for name, gate in gates.items():
        module = MarlinExperts.from_modules(
            mlps(bias=True), group_size=32, activation=name, accuracy="exact"
        ).to(device)
        want = reference(x, ids, weights, matrices_of(module), gate)
        assert relative(module(x, ids, weights), want) < EXACT, name


@pytest.mark.parametrize("format", ["s8", "fp32", ["s8", "fp4_e2m1", "u4", "bf16", "fp16", "nf4"]])
def test_fused_experts_of_gpt_oss(format: Any, device: torch.device) -> None:
    """Columns of gate and up alternate, matrices are transposed, there are biases and a limit."""
    both = random(EXPERTS, HIDDEN, 2 * INNER, seed=1) / 4
    down = random(EXPERTS, INNER, HIDDEN, seed=2) / 7
    biases = random(EXPERTS, 2 * INNER, seed=3), random(EXPERTS, HIDDEN, seed=4)
    options = {"format": format, "group_size": 16, "gate_bias": biases[0], "down_bias": biases[1],
               "limit": 2.0, "accuracy": "exact"}
    module = MarlinExperts.from_fused(both, down, transposed=True, interleaved=True, **options)
    same = MarlinExperts.from_fused(both.mT, down.mT, interleaved=True, **options)
    beside = torch.cat((both[..., ::2], both[..., 1::2]), -1)
    options["gate_bias"] = torch.cat((biases[0][:, ::2], biases[0][:, 1::2]), -1)
    apart = MarlinExperts.from_fused(beside, down, transposed=True, **options)
    x = random(12, HIDDEN, seed=5).to(device)
    ids, weights = routed(12, device)
    if isinstance(format, str) and format != "fp32":
        wide, back = (dense(part) for part in (module.gate_up_proj, module.down_proj))
    elif format == "fp32":
        wide, back = both.double(), down.double()
    else:
        lists = [[dense(module.get_submodule(f"{i}.{name}")) for i in range(EXPERTS)]
                 for name in module.names]
        wide, back = (torch.stack(one) for one in lists)
    wide_bias, back_bias = (bias.double() for bias in biases)
    parts = [
        (w[:, ::2], w[:, 1::2], b, wb[::2], wb[1::2], bb)
        for w, b, wb, bb in zip(wide, back, wide_bias, back_bias, strict=True)
    ]
    want = reference(x, ids, weights, parts, clamped)
    for one in (module, same, apart):
        assert relative(one.to(device)(x, ids, weights), want) < EXACT


def test_experts_that_are_elsewhere_add_nothing(device: torch.device) -> None:
    whole = made(device)
    parts: list[Any] = [*mlps()]
    parts[2] = parts[4] = None
    module = MarlinExperts.from_modules(parts, group_size=32).to(device)
    x = random(30, HIDDEN).to(device)
    ids, weights = routed(30, device)
    here = torch.isin(ids, torch.tensor([2, 4], device=device), invert=True)
    assert not here.all()
    assert torch.allclose(module(x, ids, weights), whole(x, ids, weights * here), atol=1e-6)


@pytest.mark.parametrize("scale", [False, True])
def test_a_block_with_a_shared_expert(scale: bool, device: torch.device) -> None:
    shared = MLP(50, bias=True, inner=96)
    shared.gate_proj = MarlinLinear.from_linear(shared.gate_proj, "u4", 32)
    gate = random(1, HIDDEN, seed=8) if scale else None
    module = made(device, shared=shared, shared_scale=gate, accuracy="exact")
    block = MarlinMoE(module, router().to(device), TOP_K, scaling_factor=1.5)
    x = random(3, 4, HIDDEN, seed=6).to(device)
    got = block(x)
    rows = x.cpu().double().reshape(-1, HIDDEN)
    scores = torch.softmax(rows @ router().weight.double().T, -1)
    weights, ids = torch.topk(scores, TOP_K)
    weights = 1.5 * weights / weights.sum(-1, keepdim=True)
    want = reference(rows, ids, weights, matrices_of(module))
    linears = (shared.gate_proj, shared.up_proj, shared.down_proj)
    parts = (*map(dense, linears), *(one.bias.detach().double().cpu() for one in linears))
    own = one_expert(rows, parts, silu)
    want += own if gate is None else own * torch.sigmoid(rows @ gate.double().T)
    assert got.shape == x.shape and relative(got, want.reshape(x.shape)) < EXACT


@pytest.mark.parametrize("routing", [
    {"scoring": "softmax_of_chosen"},
    {"normalize": False},
    {"scoring": "sigmoid", "groups": 3, "top_groups": 2, "scaling_factor": 2.5},
])
def test_a_block_is_its_router_and_its_experts(
    routing: dict[str, Any], device: torch.device
) -> None:
    module = made(device)
    bias = random(EXPERTS, seed=3)
    correction = random(EXPERTS, seed=4) if routing.get("scoring") == "sigmoid" else None
    block = MarlinMoE(module, router(), TOP_K, bias=bias, choice_bias=correction, **routing)
    block = block.to(device)
    for dtype in DTYPES:
        x = random(17, HIDDEN, seed=2).to(device, dtype)
        ids, weights = mm.moe_router_topk(
            x, router().weight.detach().T.to(device), TOP_K, bias=bias, choice_bias=correction,
            **routing
        )
        assert ids.device == weights.device == x.device and ids.dtype == torch.int32
        assert torch.equal(block(x), module(x, ids, weights))


def test_functions_and_modules_agree(device: torch.device) -> None:
    """The same ExpertSet through moe_experts, mm.MarlinMoE and the modules."""
    name = str(device)
    gate, up, down = (
        mm.pack_weights(random(EXPERTS, k, n, seed=i), "fp4_e2m1", 16)
        for i, (k, n) in enumerate([(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)])
    )
    ready = mm.prepare_experts(gate, up, down, device=name)
    x = random(2, 5, HIDDEN, seed=7).to(device)
    ids, weights = (one.reshape(2, 5, TOP_K) for one in routed(10, device))
    want = mm.moe_experts(x, ids, weights, ready, activation="relu")
    module = PreparedExperts(ready, activation="relu")
    assert torch.equal(module(x, ids, weights), want)
    scores = router().weight.detach().T
    plain = mm.MarlinMoE(ready, scores, TOP_K, activation="relu")
    assert torch.equal(MarlinMoE(module, router(), TOP_K)(x), plain(x))
    assert torch.equal(MarlinMoE(ready, router(), TOP_K)(x), mm.MarlinMoE(ready, scores, TOP_K)(x))
    # Arrays of NumPy are copied to the device and back.
    array = x.cpu().numpy()
    assert np.array_equal(plain(array), plain(x).cpu().numpy())
    lists = ids.cpu().numpy(), weights.cpu().numpy()
    got = mm.moe_experts(array, *lists, ready, activation="relu")
    assert np.array_equal(got, want.cpu().numpy())
    with pytest.raises(mm.UnsupportedError, match="cannot be copied or saved"):
        pickle.dumps(module)


def test_strides_and_shapes(device: torch.device) -> None:
    module = made(device)
    block = MarlinMoE(module, router(), TOP_K).to(device)
    wide = random(6, 240).to(device)
    for x in (
        wide[:, 8:72], wide[:, 1:65], wide[:, :128:2], random(HIDDEN, 6).to(device).T,
        wide[:1, :64].expand(5, 64), wide[0, :64], wide[:0, :64],
        random(2, 3, 4, HIDDEN).to(device)[:, :, 0],
    ):
        same = x.clone(memory_format=torch.contiguous_format)
        assert torch.equal(block(x), block(same))
        ids, weights = (one.reshape(*x.shape[:-1], TOP_K) for one in
                        routed(x.numel() // HIDDEN, device))
        twice = torch.stack((ids, ids), -1)[..., 0]  # Strided.
        assert torch.equal(module(x, twice, weights), module(same, ids, weights))


def test_a_row_does_not_depend_on_others(device: torch.device) -> None:
    block = MarlinMoE(made(device, batch_invariant=True), router(), TOP_K).to(device)
    x = random(40, HIDDEN).to(device, torch.bfloat16)
    whole = block(x)
    assert all(torch.equal(block(x[i : i + 1])[0], whole[i]) for i in range(40))


# --- operators ----------------------------------------------------------------------------------


def test_opcheck(device: torch.device) -> None:
    module = made(device)
    block = MarlinMoE(module, router(), TOP_K).to(device)
    x = random(4, HIDDEN).to(device)
    ids, weights = routed(4, device)
    torch.library.opcheck(experts, (x, ids, weights, module.handle()))
    own = [one.clone().requires_grad_() for one in (x, weights)]
    torch.library.opcheck(experts, (own[0], ids, own[1], module.handle()))
    torch.library.opcheck(experts_grad, (x, x, ids, weights, module.handle()))
    torch.library.opcheck(moe, (x, block.handle()))


def test_compile_without_graph_breaks(device: torch.device) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = made(device)
            self.block = MarlinMoE(made(device), router(), TOP_K).to(device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.softmax(x[:, :EXPERTS].float(), -1)
            weights, ids = torch.topk(scores, TOP_K)
            return self.block(self.experts(x, ids, weights) + x)

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 3, 1):
        x = random(tokens, HIDDEN, seed=tokens).to(device)
        assert torch.equal(compiled(x), layer(x))
    # New weights are seen: the handle is guarded.
    layer.experts.load_state_dict(MarlinExperts.from_modules(mlps()[::-1], group_size=32)
                                  .state_dict())
    assert torch.equal(compiled(x), layer(x))


def test_gradients(device: torch.device) -> None:
    shared = MLP(50)
    both: list[tuple[dict[str, Any], Any]] = [
        ({"shared": shared, "shared_scale": random(1, HIDDEN, seed=8)}, silu),
        ({"limit": 2.0}, clamped),
    ]
    for options, gate in both:
        module = MarlinExperts.from_modules(mlps(bias=True), group_size=32, **options).to(device)
        matrices = matrices_of(module)
        x = random(7, HIDDEN).to(device).requires_grad_()
        ids, weights = routed(7, device)
        ids[3] = ids[3, 0]  # The same expert twice.
        weights = weights.requires_grad_()
        incoming = random(7, HIDDEN, seed=12)
        module(x, ids, weights).backward(incoming.to(device))
        rows, factors = (one.detach().cpu().double().requires_grad_() for one in (x, weights))
        out = torch.zeros(7, HIDDEN, dtype=torch.float64)
        for token, slot in np.ndindex(7, TOP_K):
            part = one_expert(rows[token], matrices[int(ids[token, slot])], gate)
            out = out.index_add(
                0, torch.tensor([token]), (factors[token, slot] * part)[None]
            )
        if "shared" in options:
            linears = (shared.gate_proj, shared.up_proj, shared.down_proj)
            own = one_expert(rows, tuple(map(dense, linears)), gate)
            out = out + own * torch.sigmoid(rows @ options["shared_scale"].double().T)
        out.backward(incoming.double())
        assert x.grad is not None and weights.grad is not None
        assert relative(x.grad, rows.grad) < 1e-5
        assert relative(weights.grad, factors.grad) < 1e-5


def test_no_gradient_through_the_router(device: torch.device) -> None:
    block = MarlinMoE(made(device), router(), TOP_K).to(device)
    x = random(2, HIDDEN).to(device).requires_grad_()
    y = block(x)
    with pytest.raises(mm.UnsupportedError, match="no gradient through the router"):
        y.sum().backward()


def test_memory_of_the_caller() -> None:
    """With an allocator, as on a GPU: all memory comes from it, and the bits are the same."""
    module = made(torch.device("cpu"), shared=MLP(50))
    block = MarlinMoE(module, router(), TOP_K, bias=random(EXPERTS, seed=3))
    x = random(9, HIDDEN)
    layer = layers.find(block.handle())
    assert layer.router is not None
    taken: list[torch.Tensor] = []

    def allocate(count: int) -> _core.ArrayView:
        taken.append(torch.full((count + 64,), 255, dtype=torch.uint8))
        begin = -taken[-1].data_ptr() % 64
        return _core.ArrayView(
            taken[-1], taken[-1].data_ptr() + begin, "uint8", [count], [1], "cpu", 0
        )

    out = torch.empty_like(x)
    operands = _core.Operands("float32", (x.data_ptr(), 9, HIDDEN, HIDDEN), out.data_ptr(), -1, 0)
    _core.moe_at(layer.experts, layer.router, layer.how, operands, allocate)
    assert torch.equal(out, block(x)) and len(taken) == 1
    ids, weights = routed(9, torch.device("cpu"))
    ids, taken[:] = ids.int(), []
    lists = (ids.data_ptr(), weights.data_ptr(), TOP_K)
    _core.experts_at(layer.experts, layer.how, operands, lists, allocate)
    assert torch.equal(out, block.experts(x, ids, weights)) and len(taken) == 1


# --- modules ------------------------------------------------------------------------------------


def test_state_copies_and_types(device: torch.device) -> None:
    def block(reverse: bool) -> MarlinMoE:
        modules = mlps(bias=True)[:: -1 if reverse else 1]
        shared = MLP(51 if reverse else 50)
        module = MarlinExperts.from_modules(
            modules, format=["nf3"] * 5 + ["bf16"], group_size=32, shared=shared
        )
        bias = random(EXPERTS, seed=int(reverse))
        return MarlinMoE(module, router(int(reverse)), TOP_K, scoring="sigmoid", choice_bias=bias)

    one, other = block(False).to(device), block(True).to(device)
    x = random(6, HIDDEN).to(device)
    want = one(x)
    assert not torch.allclose(other(x), want)
    other.load_state_dict(one.state_dict())
    for same in (other, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(same(x), want)
        inner = same.experts
        ids, weights = routed(6, device)
        assert torch.equal(inner(x, ids, weights), one.experts(x, ids, weights))
    half = copy.deepcopy(one).half()
    assert half.choice_bias.dtype == torch.float32 and half.router_weight.dtype == torch.float16
    assert relative(half(x), want) < 0.01
    lost = other.experts.handle()
    count = len(layers)
    other.experts.get_submodule("0.gate_proj").refresh()
    assert len(layers) == count - 2 and torch.equal(other(x), want)
    with pytest.raises(mm.InvalidArgumentError, match=f"handle: {lost} is not valid"):
        experts(x, ids, weights, lost)
    del other, same, inner
    empty = MarlinExperts.from_modules(mlps(), group_size=32).to("meta")
    with pytest.raises(mm.UnsupportedError, match="on the meta device"):
        empty(x, ids, weights)


def test_loading_changes_what_is_not_quantized(device: torch.device) -> None:
    one, other = (
        MarlinExperts.from_modules(modules, format="fp32").to(device)
        for modules in (mlps(), mlps()[::-1])
    )
    x = random(6, HIDDEN).to(device)
    first, second = (MarlinMoE(e, router(i), TOP_K).to(device) for i, e in enumerate((one, other)))
    want, before = first(x), second(x)
    given = router(1)
    own = MarlinMoE(one, given, TOP_K)
    own.load_state_dict(first.state_dict())
    assert torch.equal(given.weight, router(1).weight)  # The caller's stays.
    other.load_state_dict(one.state_dict())
    assert not torch.equal(second(x), before)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), want)
    with torch.no_grad():
        first.router_weight.copy_(router(3).weight)
    assert torch.equal(first(x), want)  # Prepared once, as documented.
    first.refresh()
    assert not torch.equal(first(x), want)


def test_errors(device: torch.device) -> None:
    module = made(device)
    block = MarlinMoE(module, router(), TOP_K).to(device)
    x = random(2, HIDDEN).to(device)
    ids, weights = routed(2, device)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: block(x[:, 1:]), r"x: expected \[..., 64\], got \[2, 63\]"),
        (lambda: block(x[0, 0]), r"x: expected \[..., 64\], got \[\]"),
        (lambda: block(x.double()), "x: expected float32, float16 or bfloat16, got torch.float64"),
        (lambda: block(x.to("meta")), "x: on meta, but the weights are on"),
        (lambda: module(x[:, 1:], ids, weights), r"x: expected \[..., 64\]"),
        (lambda: module(x, ids[:1], weights), r"ids: expected \[..., top_k\]"),
        (lambda: module(x, ids, weights[:, :1]), r"ids: expected \[..., top_k\]"),
        (lambda: module(x, ids.float(), weights), "ids: expected int32 or int64, got float32"),
        (lambda: module(x, ids[:, :0], weights[:, :0]), "top_k: expected 1 or more, got 0"),
        (lambda: MarlinMoE(module, router(), 7), "top_k: expected 1..6"),
        (lambda: MarlinMoE(nn.Linear(2, 2), router(), 2), "experts: expected an ExpertSet"),
        (lambda: made(device, shared_scale=random(1, HIDDEN)), "shared_scale: expected None"),
        (lambda: MarlinMoE(module, router().weight[:4], 2), r"router: expected \[6, 64\]"),
        (lambda: MarlinMoE(module, router(), 2, scoring="max"), "scoring: unknown name 'max'"),
        (lambda: made(device, activation="tanh"), "activation: unknown name 'tanh'"),
        (lambda: made(device, accuracy="best"), "accuracy: unknown name 'best'"),
        (lambda: made(device, format=["u4"]), "format: expected 6, one per expert, got 1"),
        (lambda: MarlinExperts.from_modules([nn.Linear(2, 2)]), "gate_proj: expected a linear"),
        (lambda: MarlinExperts.from_fused(random(4, 4), random(4, 4)), "gate_up_proj: expected"),
        (lambda: MarlinExperts([], None, [KeptMatrix(4, 4)]), r"different counts \[0, 1\]"),
        (lambda: experts(x, ids, weights, 0), "handle: 0 is not valid"),
        (lambda: moe(x, module.handle() + 10**6), "is not valid"),
        (lambda: moe(x, module.handle()), "has no router"),
    ]
    for call, says in refused:
        with pytest.raises(mm.InvalidArgumentError, match=says) as caught:
            pytest.fail(f"no error that says {says}: {call()}")
        assert len(str(caught.value).splitlines()) == 1
    if device.type == "cpu":
        for wrong in (-1, EXPERTS, 2**32):
            with pytest.raises(mm.InvalidArgumentError, match=r"is not in 0\.\.5"):
                module(x, torch.full_like(ids, wrong), weights)
        with pytest.raises(mm.InvalidArgumentError, match=r"NaN at \[1, 0\]"):
            block(torch.stack((x[0], x[1] * torch.nan)))


# --- NVIDIA GPUs --------------------------------------------------------------------------------


@on_gpu
def test_wrong_ids_are_reported_by_synchronize() -> None:
    module = made(torch.device("cuda", 0))
    x = random(2, HIDDEN).cuda()
    ids, weights = routed(2, x.device)
    module(x, torch.full_like(ids, EXPERTS), weights)
    with pytest.raises(mm.InvalidArgumentError, match=r"is not in 0\.\.5"):
        mm.open_device("cuda:0").synchronize()
    module(x, ids, weights)
    mm.open_device("cuda:0").synchronize()


@on_gpu
def test_no_call_waits_for_the_device() -> None:
    block = MarlinMoE(made(torch.device("cuda", 0)), router(), TOP_K).cuda()
    x = random(5, HIDDEN).cuda()
    want = block(x)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4_000_000_000)  # Cycles: seconds, while the calls take milliseconds.
        got = block(x)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@on_gpu
@pytest.mark.parametrize("tokens", [1, 8, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_are_captured_and_replayed(dtype: torch.dtype, tokens: int) -> None:
    """The first call may be captured: nothing outside PyTorch's memory is allocated."""
    module = made(torch.device("cuda", 0))
    block = MarlinMoE(module, router(), TOP_K).cuda()
    x = random(tokens, HIDDEN).to("cuda", dtype)
    ids, weights = routed(tokens, x.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = block(x)
        z = module(y, ids, weights)
    for seed in range(3):
        x.copy_(random(tokens, HIDDEN, seed=seed))
        ids.copy_(routed(tokens, x.device, seed=seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, block(x)) and torch.equal(z, module(y, ids, weights))
