"""Claims about the router and the movement of tokens to experts (llmc/device/experts_api.h), which check_layers.py imports. Sums
over slots must have the bits of their definition: where a product with a weight is exact, every device rounds alike."""
import itertools
import numpy as np
from layers import (
    ADD, EXPERTS, F32, SET, after, begin, call, claim, f, gradient_before, integers, largest, near, normal, normal_f, numbers, on,
    rows, same, to_stored, unset, unset_f, within, x)


def sum_error(terms): return min(4 + terms, 8 + 2 * terms**0.5)
def unset_i(*shape): return integers(np.full(shape, -7))
def one_hot(chosen, E): return np.eye(E)[chosen] # (N,k,E)


# ---- definitions in float64 ----
def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True, initial=-1e300))
    return e / e.sum(-1, keepdims=True)


def choice(p, bias, k):
    """By score, then by probability; both times the lower index among equals."""
    score = p if bias is None else p + bias
    best = np.sort(np.argsort(-score, -1, "stable")[:, :k], -1)
    order = np.argsort(-np.take_along_axis(p, best, -1), -1, "stable")
    return np.take_along_axis(best, order, -1).astype("i4")


def weigh(q): return q if q.shape[1] == 1 else q / q.sum(-1, keepdims=True)


def logit_gradients(dweights, balance, p, chosen, weights):
    """Of the weights, and of the sum over tokens and experts of balance times p."""
    dz, k = np.zeros(p.shape), chosen.shape[1]
    dp = np.zeros(p.shape) if balance is None else np.broadcast_to(balance, p.shape).copy()
    for t, j in itertools.product(*map(range, chosen.shape)):
        if k == 1: dp[t, chosen[t, j]] += dweights[t, j]
        else: dz[t, chosen[t, j]] = weights[t, j] * (dweights[t, j] - (weights[t] * dweights[t]).sum())
    return dz + p * (dp - (p * dp).sum(-1, keepdims=True))


def places_of(chosen, E, capacity):
    counts, taken = np.bincount(chosen.reshape(-1), minlength=E).astype("i4"), np.zeros(E, int)
    first, places = np.cumsum(counts) - counts, np.full(chosen.shape, -1, "i4")
    for t, j in itertools.product(*map(range, chosen.shape)):
        i = chosen[t, j]
        if capacity == 0: places[t, j] = first[i] + taken[i]
        elif taken[i] < capacity: places[t, j] = i * capacity + taken[i]
        taken[i] += 1
    return counts, places


def summed_slots(terms, places):
    """terms (N,k,C) in fp32, from the first slot on that is not dropped."""
    out = np.zeros((len(terms), terms.shape[2]), "f4")
    for t, row in enumerate(terms):
        kept = [term for term, place in zip(row, places[t]) if place >= 0]
        if kept: out[t] = kept[0]
        for term in kept[1:]: out[t] += term
    return out


def random_choice(N, E, k): return np.array([on.rng.permutation(E)[:k] for _ in range(N)], "i4").reshape(N, k)


def row_count(N, E, k, capacity): return E * capacity if capacity else N * k


# ---- the router ----
def route(a, w, bias, k):
    """probs, chosen and weights of two arrays."""
    (N, C), E = a.start.shape, len(w.start)
    results = unset_f(N, E), unset_i(N, k), unset_f(N, k)
    call("router_forward", *results, a, w, bias, N, C, E, k)
    return results


def check_choice(probs, chosen, weights, bias, k):
    p = probs.bits()
    want = choice(p, bias if bias is None else bias.bits(), k)
    same("the choice", chosen, want)
    q = np.take_along_axis(p, want.astype(int), -1)
    if k == 1: same("the weight", weights, q)
    else: near("weights", weights, weigh(q.astype("f8")), relative=4 * F32 + k * F32)


def check_router(N, C, E, k, biased=False):
    begin(1, max(N, 1), C, 1, 1, EXPERTS)
    a, w, bias = normal(N, C), normal(E, C, std=2 * C**-0.5), normal_f(E, std=0.3) if biased else None
    probs, chosen, weights = route(a, w, bias, k)
    z = a.d @ w.d.T
    near("probs", probs, softmax(z), relative=F32 * (16 + 2 * sum_error(C) * (1 + largest(z))))
    check_choice(probs, chosen, weights, bias, k)


SHAPES = [ # N, C, E, k
    (5, 64, 4, 2), (3, 33, 3, 1), (0, 16, 4, 2), (7, 8, 33, 3), (1, 1, 1, 1), (9, 20, 4, 4),
    (70, 264, 8, 1), (300, 48, 8, 2), (2, 520, 256, 8), (33, 24, 65, 5), (130, 7, 2, 1)]


@claim
def router_chooses_the_largest_and_weighs_them_by_their_probabilities():
    for shape, biased in itertools.product(rows(SHAPES, 4), (False, True)): check_router(*shape, biased)


@claim
def router_breaks_ties_by_the_lower_index_and_keeps_the_bias_out_of_the_weights():
    C, a = 16, np.linspace(0.25, 4, 5)[:, None] * np.eye(16)[0]
    for k, (values, tied) in itertools.product((1, 2, 3), ( # logits of the experts, as multiples of the token's
            ([0, 0, 0, 0, 0], [0, 1, 2]), ([-1, 2, 0, 2, 2], [1, 3, 4]), ([1, 0, 1, 0, 1], [0, 2, 4]),
            ([0, 0, 3, 0, 0], [2, 0, 1]))):
        begin(1, 5, C, 1, 1, EXPERTS)
        tokens, w = x(a), x(np.outer(values, np.eye(C)[0]))
        probs, chosen, weights = route(tokens, w, None, k)
        same("experts with ties", chosen, np.tile(np.int32(tied[:k]), (5, 1)))
        check_choice(probs, chosen, weights, None, k)
        for shift in 0.5, -0.5: # the same for all: changes nothing, whether positive or not
            again = route(tokens, w, f([shift] * 5), k)
            for what, one, other in zip(("probs", "the choice", "weights"), again, (probs, chosen, weights)):
                same(f"{what} with a bias of {shift}", one, other)
    begin(1, 40, C, 1, 1, EXPERTS)
    tokens, w = normal(40, C), normal(65, C, std=0.1)
    for bias in -100 * np.isin(np.arange(65), (3, 40, 64), invert=True), np.isin(np.arange(65), (3, 40, 64)) - 9:
        probs, chosen, weights = route(tokens, w, f(bias), 3)
        assert (np.sort(chosen.bits()) == [3, 40, 64]).all(), "the bias does not decide"
        check_choice(probs, chosen, weights, f(bias), 3)
    # Three experts whose probabilities are too small for fp32, which the bias prefers: 0 / 0 would be NaN.
    begin(1, 1, C, 1, 1, EXPERTS)
    probs, chosen, weights = route(x(np.eye(1, C)), x(np.outer([0, 0, 200, 0], np.eye(C)[0])), f([1, 1, 0, 1]), 2)
    assert (chosen.bits() == [[0, 1]]).all() and (weights.get() == 0).all(), "weights without a sum"


@claim
def router_makes_probabilities_nan_and_chooses_different_experts_if_a_logit_is_not_finite():
    for bad, k, E in itertools.product((np.nan, np.inf), (1, 2, 5), (5, 40)):
        begin(1, 3, 8, 1, 1, EXPERTS)
        a = numbers(3, 8)
        a[1, 2] = bad
        probs, chosen, weights = route(x(a), normal(E, 8), None, k)
        assert np.isnan(probs.get()).all(1).tolist() == [False, True, False] and np.isnan(weights.get()[1]).all()
        assert all(len({*row}) == k and 0 <= min(row) and max(row) < E for row in chosen.bits()), chosen.bits()


def check_router_backward(N, C, E, k, mode=SET, balanced=True):
    begin(1, max(N, 1), C, 1, 1, EXPERTS)
    a, w = normal(N, C), normal(E, C, std=C**-0.5)
    p = f(softmax(numbers(N, E)))
    chosen = integers(choice(p.start, 0.3 * numbers(E), k))
    weights = f(weigh(np.take_along_axis(p.d, chosen.start.astype(int), -1)))
    dweights, balance = normal_f(N, k), normal_f(E, std=0.5) if balanced else None
    dinp, dw, dlogits = normal(N, C), gradient_before(mode, E, C), unset_f(N, E)
    call("router_backward", dinp, dw, dlogits, dweights, balance, p, chosen, weights, a, w, N, C, E, k, mode)
    want = logit_gradients(dweights.d, balance and balance.d, p.d, chosen.start, weights.d)
    near("dlogits", dlogits, want, 8 + sum_error(E))
    dz = dlogits.get()
    near("dinp", dinp, dinp.d + dz @ w.d, sum_error(E))
    near("dw", dw, after(mode, dw, dz.T @ a.d), 2 * sum_error(N))
    if not balanced and k > 1: # of an expert that was not chosen
        assert (dz[one_hot(chosen.start, E).sum(1) == 0] == 0).all(), "weights that are normalised move other logits"
    if N == 0 and mode == SET: same("dw without a token", dw, to_stored(np.zeros((E, C))))


@claim
def router_gradients_follow_their_definition():
    """Where most floats of a sum are added in chunks, too."""
    for shape, mode, balanced in itertools.product(rows(SHAPES + [(700, 40, 12, 2)], 4), (SET, ADD), (False, True)):
        check_router_backward(*shape, mode, balanced)


# ---- rows ----
def sort(chosen, E, capacity):
    N, k = chosen.shape
    counts, places = unset_i(E), unset_i(N, k)
    call("experts_sort", counts, places, integers(chosen), N, E, k, capacity)
    return counts, places


def check_sort(chosen, E, capacity):
    begin(1, max(len(chosen), 1), 1, 1, 1, EXPERTS)
    got, want = sort(chosen, E, capacity), places_of(chosen, E, capacity)
    for what, one, other in zip(("counts", "places"), got, want): same(f"{what} of {chosen.shape}, {capacity} rows", one, other)
    counts, places = (a.bits() for a in got)
    assert counts.sum() == chosen.size, "some slots are not counted"
    kept = places[places >= 0]
    assert len({*kept}) == kept.size == (np.minimum(counts, capacity) if capacity else counts).sum(), "a row has two slots"


@claim
def experts_rows_are_sorted_and_counted_before_any_is_dropped():
    for N, E, k in rows([(5, 4, 2), (0, 3, 1), (40, 33, 3), (1, 1, 1), (700, 8, 1), (300, 256, 8), (1500, 5, 2), (65, 2, 2)], 4):
        for capacity in 0, 1, N * k // E + 1, N * k + 3: check_sort(random_choice(N, E, k), E, capacity)
    for expert, capacity in itertools.product((0, 2), (0, 1, 7, 90)): check_sort(np.full((70, 1), expert, "i4"), 3, capacity)


def spread(*shape): return numbers(*shape) * 2.0**on.rng.integers(-6, 7, shape) # whose sum shows its order in fp32


def padded(values, places):
    """Rows that no slot has are NaN: nobody reads them."""
    values[np.isin(np.arange(len(values)), places[places >= 0], invert=True)] = np.nan
    return x(values)


def check_rows(N, C, E, k, capacity):
    begin(1, max(N, 1), C, 1, 1, EXPERTS)
    chosen, R = random_choice(N, E, k), row_count(N, E, k, capacity)
    counts, places = places_of(chosen, E, capacity)
    tokens, at, kept = np.repeat(np.arange(N), k).reshape(N, k), integers(places), places >= 0

    out, inp = unset(R, C), normal(N, C)
    call("experts_permute_forward", out, inp, at, R, N, C, k)
    want = np.zeros_like(out.start)
    want[places[kept]] = inp.start[tokens[kept]]
    same("rows of tokens", out, want)

    dinp, dout = unset(N, C), padded(spread(R, C), places)
    call("experts_permute_backward", dinp, dout, at, N, C, k)
    terms = dout.d.astype("f4")[places] if R else np.zeros((N, k, C), "f4")
    same("sums over slots", dinp, to_stored(summed_slots(terms, places)))

    weights, got = f(2.0**on.rng.integers(-3, 4, (N, k))), unset(N, C) # products are exact
    call("experts_combine_forward", got, dout, weights, at, N, C, k)
    same("sums over weighted slots", got, to_stored(summed_slots(terms * weights.start[:, :, None], places)))
    weights, got = f(on.rng.random((N, k))), unset(N, C)
    call("experts_combine_forward", got, dout, weights, at, N, C, k)
    exact = np.where(kept[:, :, None], terms.astype("f8"), 0) * weights.d[:, :, None]
    near("sums over slots with any weights", got, exact.sum(1), k + 1)

    dy, dweights, d = unset(R, C), unset_f(N, k), normal(N, C)
    call("experts_combine_backward", dy, dweights, d, dout, weights, at, R, N, C, k)
    want = np.zeros_like(dy.start)
    want[places[kept]] = to_stored((d.d.astype("f4")[:, None] * weights.start[:, :, None])[kept])
    same("gradients of rows", dy, want)
    products = np.where(kept, (np.where(kept[:, :, None], terms.astype("f8"), 0) * d.d[:, None]).sum(-1), 0)
    near("gradients of weights", dweights, products, 2 * sum_error(C))
    assert (dweights.get()[~kept] == 0).all(), "a dropped slot has a gradient"


@claim
def experts_rows_are_moved_padded_with_zeros_and_added_up_in_slot_order():
    for N, C, E, k in rows([(9, 32, 4, 3), (7, 5, 3, 1), (0, 8, 2, 1), (20, 16, 4, 2), (40, 33, 16, 5), (3, 1100, 2, 2),
                            (33, 520, 8, 4), (1, 1, 1, 1)], 4):
        for capacity in 0, 1, N * k // E + 2: check_rows(N, C, E, k, capacity)


# ---- all together ----
def chain(a, w, bias, k, capacity, dout, alpha, scale, shift):
    """Forward and backward through experts y = tanh(scale x + shift), each with one number of each. Returns what a token has, in
    order, what the router has, and facts for the definition."""
    (N, C), E = a.start.shape, len(w.start)
    R, results = row_count(N, E, k, capacity), route(a, w, bias, k)
    probs, chosen, weights = (r.keep() for r in results)
    counts, places = (r.keep() for r in sort(chosen.start, E, capacity))
    inside, out, dy, dinside, dinp = unset(R, C), unset(N, C), unset(R, C), unset(R, C), unset(N, C)
    call("experts_permute_forward", inside, a, places, R, N, C, k)
    owner = np.zeros(R, int)
    kept = places.start >= 0
    owner[places.start[kept]] = chosen.start[kept]
    s, h = scale[owner][:, None], np.tanh(scale[owner][:, None] * inside.get() + shift[owner][:, None])
    y = x(h)
    call("experts_combine_forward", out, y, weights, places, N, C, k)
    dweights, dlogits, dw = unset_f(N, k), unset_f(N, E), unset(E, C)
    call("experts_combine_backward", dy, dweights, dout, y, weights, places, R, N, C, k)
    assert (dy.get()[np.isin(np.arange(R), places.start, invert=True)] == 0).all(), "padding has a gradient"
    dinside = x(dy.get() * s * (1 - h**2))
    call("experts_permute_backward", dinp, dinside, places, N, C, k)
    dinp.keep()
    balance = None if alpha == 0 else f(alpha * E * counts.start / (N * k) / N)
    call("router_backward", dinp, dw, dlogits, dweights.keep(), balance, probs, chosen, weights, a, w, N, C, E, k, SET)
    return (probs, chosen, weights, out, dweights, dlogits, dinp), dw, (chosen.start, kept, balance and balance.d)


def loss_of(a, w, dout, scale, shift, chosen, kept, balance):
    """The same in float64. The choice, drops and the auxiliary loss' shares are constants."""
    p = softmax(a @ w.T)
    weights = weigh(np.take_along_axis(p, chosen.astype(int), -1))
    y = np.tanh(scale[chosen][:, :, None] * a[:, None] + shift[chosen][:, :, None])
    out = (np.where(kept, weights, 0)[:, :, None] * y).sum(1)
    return (out * dout).sum() + (0 if balance is None else (p * balance).sum())


def chain_inputs(N, C, E): return normal(N, C), normal(E, C, std=C**-0.5), normal(N, C), 1 + 0.5 * numbers(E), 0.3 * numbers(E)


@claim
def experts_gradients_agree_with_finite_differences():
    def derivative(function, h=1e-3):
        values = [function(h * n) for n in (-2, -1, 1, 2)]
        return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)

    N, C, E = 12, 24, 5
    for k, capacity, alpha in itertools.product((1, 2, 3), (0, 2), (0, 3)): # 10 rows are too few
        begin(1, N, C, 1, 1, EXPERTS)
        a, w, dout, scale, shift = chain_inputs(N, C, E)
        bias = normal_f(E, std=0.1)
        (*_, dinp), dw, facts = chain(a, w, bias, k, capacity, dout, alpha, scale, shift)
        assert facts[1].all() == (capacity == 0)
        rest = dout.d, scale, shift, *facts
        for what, gradient, loss in (("tokens", dinp.get(), lambda change: loss_of(a.d + change, w.d, *rest)),
                                     ("the router", dw.get(), lambda change: loss_of(a.d, w.d + change, *rest))):
            for _ in range(3):
                direction = numbers(*gradient.shape)
                within(f"the gradient of {what}, k = {k}, capacity {capacity}, alpha {alpha}", (gradient * direction).sum(),
                       derivative(lambda h: loss(h * direction)),
                       (8 * on.eps if on.is_16 else 64 * F32) * np.linalg.norm(gradient * direction) + 1e-8)


@claim
def experts_give_a_token_the_same_bits_wherever_it_lies():
    """In another order of tokens, and with other rows; unless the other order drops other slots."""
    N, C, E = 30, 40, 4
    for k, capacity in itertools.product((1, 2, 3), (0, N)):
        begin(1, N, C, 1, 1, EXPERTS)
        a, w, dout, scale, shift = chain_inputs(N, C, E)
        one, _, _ = chain(a, w, None, k, 0, dout, 1, scale, shift)
        order = on.rng.permutation(N)
        other, _, _ = chain(x(a.d[order]), w, None, k, capacity, x(dout.d[order]), 1, scale, shift)
        for number, (first, second) in enumerate(zip(one, other)):
            same(f"result {number} of tokens in another order", second, first.bits()[order])


@claim
def experts_give_a_dropped_token_nothing_and_no_gradient():
    """All tokens choose the same experts, which have rows for the first two; the last ones get 0, to the bit."""
    for k in 1, 2:
        begin(1, 6, 16, 1, 1, EXPERTS)
        a, w, dout, scale, shift = chain_inputs(6, 16, 3)
        (*_, out, dweights, dlogits, dinp), _, (chosen, kept, _) = chain(a, w, f([9, 9 * (k - 1), 0]), k, 2, dout, 0, scale, shift)
        assert (np.sort(chosen) == np.arange(k)).all() and kept.all(1).tolist() == [True] * 2 + [False] * 4
        for what, array in ("output", out), ("weights", dweights), ("logits", dlogits), ("input", dinp):
            same(f"the {what} of a dropped token", array.bits()[2:], np.zeros_like(array.start[2:]))
            assert array.get()[:2].any(1).all()


@claim
def one_expert_leaves_every_bit_as_it_was():
    for N, C in (5, 16), (3, 33):
        begin(1, N, C, 1, 1, EXPERTS)
        a, y, dout = (x(np.where(np.arange(C) % 3 == i, -0.0, numbers(N, C))) for i in range(3))
        w = normal(1, C)
        probs, chosen, weights = (r.keep() for r in route(a, w, None, 1))
        for array in probs, weights: same("a probability or weight", array, np.ones((N, 1), "f4"))
        _, places = (r.keep() for r in sort(chosen.start, 1, 0))
        out, dweights, dlogits, dw = unset(N, C), unset_f(N, 1), unset_f(N, 1), unset(1, C)
        call("experts_permute_forward", out, a, places, N, N, C, 1)
        same("tokens in rows", out, a.start)
        call("experts_combine_forward", out, y, weights, places, N, C, 1)
        same("outputs", out, y.start)
        call("experts_permute_backward", out, y, places, N, C, 1)
        same("gradients of tokens", out, y.start)
        call("experts_combine_backward", out, dweights, dout, y, weights, places, N, N, C, 1)
        same("gradients of rows", out, dout.start)
        for balance in None, f([0.7]):
            dinp = x(a.d)
            call("router_backward", dinp, dw, dlogits, dweights.keep(), balance, probs, chosen, weights, a, w, N, C, 1, 1, SET)
            assert (dlogits.get() == 0).all() and (dw.get() == 0).all(), "a softmax over one logit has a gradient"
            same("gradients past the router", dinp, a.start)
