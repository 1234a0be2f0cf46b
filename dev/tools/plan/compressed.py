"""The seconds of gradients that travel compressed, as train_gpt2_compress sends them, from the step on in which it compresses.

Bytes       are that program's own.
Messages    are its packets and its buckets of vectors. A method with a packet for each tensor pays a latency for each.
Compressing reads and writes memory, counted kernel by kernel (llmc/device/compress_api.h) and divided by --memory-bandwidth.
            Packing comes before a message, beside backward; unpacking after backward. Without a bandwidth it takes no time, as the
            update. Gram-Schmidt and the sums of scales are not counted, because their arrays are small.
"""
from dataclasses import dataclass
from machines import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from questions import DDP, answer_of, question

METHODS = ("none", "bf16", "fp16", "int8", "int4", "top-k", "sign", "onebit-adam", "powersgd")
FED_BY_DEFAULT = ("int4", "onebit-adam", "powersgd")
QUANTISE_BLOCK = 256 # elements of int8 and int4 that share a scale


def is_possible(plan):
    """Gradients of 16 bits cannot be rounded to 16 bits: the program refuses then."""
    return plan.X == 4 or plan.compress.method not in ("bf16", "fp16")


@dataclass
class Packets:
    """How many operations, and the bytes of their largest buffers together; bytes that packing and unpacking read and write."""
    sums: int = 0            # all-reduces, all-to-alls, all-gathers
    exchanges: int = 0
    gathers: int = 0
    summed: float = 0
    exchanged: float = 0
    gathered: float = 0
    packing: float = 0
    unpacking: float = 0

    def seconds(self, w, N):
        """In which N ranks send them. Exchanged parts take as long as in a reduce-scatter."""
        parts = ((ALL_REDUCE, self.summed, self.sums), (REDUCE_SCATTER, self.exchanged, self.exchanges),
                 (ALL_GATHER, self.gathered, self.gathers))
        return sum(n * w.world_seconds(what, nbytes / n, N) for what, nbytes, n in parts if n > 0)


def touched(plan, n, row):
    """Bytes that packing and unpacking a packet of n elements read and write, each array once a pass. row: all N parts, or N
    rows."""
    method, N, X, F = plan.compress.method, plan.N, plan.X, 4
    feedback = method in FED_BY_DEFAULT if plan.compress.feedback is None else plan.compress.feedback
    fed, part = 2 * F if feedback else 0, (n + (2 * n if feedback else 0) + n) * F / N # fp32: a sum is written and read, its error too
    if method in ("bf16", "fp16"): return n * (X + 2 + fed), n * (2 + X)
    if method in ("int8", "int4"): return n * (X + fed) + row, row + part + row / N + row + n * X
    if method == "top-k": # the k largest take four passes for the digits of |x|, one that counts and one that sends
        return n * (X + F + fed / 2) + 6 * n * F + fed / 2 * n + row / N, row + n * (F + F + X)
    if method == "sign": # one pass for the scale, one for the signs
        return n * (X + F + fed / 2) + 2 * n * F + fed / 2 * n + row / N, row + n * X
    if method == "onebit-adam": return n * (F + X + F + fed / 2) + 2 * n * F + fed / 2 * n + row, row + part + row / N + row + n * F
    return n * (X + F + fed / 2) + 2 * n * F, n * (F + X + fed / 2) # powersgd: two products read x, and the last kernel as well


def add_bucket(u, plan, n, sent, received):
    """sent, received: bytes of its packet's buffers; 0: it is sent whole, by onebit-adam in fp32."""
    method = plan.compress.method
    if sent == 0:
        u.sums += 1
        u.summed += float(n * (4 if method == "onebit-adam" else plan.X))
        return
    packing, unpacking = touched(plan, float(n), float(sent))
    u.packing += packing
    u.unpacking += unpacking
    exchanged = method in ("int8", "int4", "onebit-adam")
    if exchanged: u.exchanges, u.exchanged = u.exchanges + 1, u.exchanged + sent
    if exchanged or method in ("top-k", "sign"): u.gathers, u.gathered = u.gathers + 1, u.gathered + sent
    else: u.sums, u.summed = u.sums + (2 if method == "powersgd" else 1), u.summed + sent + received


def packets_of(plan):
    """Of the root, and of all blocks."""
    root, blocks, end = Packets(), Packets(), plan.config.unit(0)
    for begin, n, sent, received in answer_of(plan, DDP, question(plan, DDP))["more"]:
        add_bucket(root if begin < end else blocks, plan, n, sent, received)
    return root, blocks


def touched_seconds(plan, nbytes): return nbytes / plan.memory_bandwidth if plan.memory_bandwidth > 0 else 0


def compressed_messages(plan, w, groups):
    """Seconds of each group's reduction, of its packing, and of unpacking. All blocks are alike, though the first bucket is
    smaller."""
    root, blocks = packets_of(plan)
    each, L = blocks.seconds(w, plan.N), plan.config.L
    reduce = [root.seconds(w, plan.N)] + [each / L] * (groups - 1)
    packing = [touched_seconds(plan, root.packing)] + [touched_seconds(plan, blocks.packing / L)] * (groups - 1)
    return reduce, packing, touched_seconds(plan, root.unpacking + blocks.unpacking)


def pytorch_int8_bytes(elements, buckets, N):
    """PyTorch's quantization_pertensor_hook: every rank gathers all ranks' whole gradients in int8, and a scale and a zero point of
    each (torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py). Bytes sent by a rank."""
    return (N - 1) * (elements + 8 * buckets)
