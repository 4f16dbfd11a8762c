"""plan: sizes and speeds from a config.json, without weights."""

from __future__ import annotations

import json
import shutil
import unittest

from command_line import (CONFIGS, GLM, IO, MALFORMED, QWEN, USAGE, CommandTestCase,
                          write_safetensors)

# Published parameters in billions: total, and the tolerance of the published digits.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 0.05),
    "llama-3-8b": (8.03, 0.005),
    "qwen3-30b-a3b": (30.5, 0.05),
    "glm-4.5-air": (106.5, 0.5),
    "gpt-oss-120b": (116.8, 0.05),
    "deepseek-v3": (671.0, 0.5),
}


class Plan(CommandTestCase):
    """Totals, shares and ceilings."""

    def test_published_totals(self) -> None:
        for name, (billions, tolerance) in PUBLISHED.items():
            plan = self.document("plan", CONFIGS / f"{name}.json", "--bandwidth", 100)
            self.assertAlmostEqual(plan["parameters"] * 1e-9, billions, delta=tolerance, msg=name)
            parts = plan["layers"] + [plan["outside_layers"]]
            for key in ("parameters", "bytes", "tensors"):
                total = sum(part[key] for part in parts)
                self.assertEqual(total, sum(row[key] for row in plan["classes"]), name)
                if key != "tensors":
                    self.assertEqual(total, plan[key], name)
            self.assertAlmostEqual(plan["bits_per_weight"],
                                   8 * plan["bytes"] / plan["parameters"])

    def test_ceiling_follows_from_bandwidth(self) -> None:
        config = CONFIGS / "qwen3-30b-a3b.json"
        slow = self.document("plan", config, "--bandwidth", 100)["decode"]
        fast = self.document("plan", config, "--bandwidth", 300)["decode"]
        self.assertEqual(slow["bandwidth_source"], "given")
        self.assertAlmostEqual(slow["tokens_per_second"], 100e9 / slow["bytes_per_token"])
        self.assertAlmostEqual(fast["tokens_per_second"] / slow["tokens_per_second"], 3)
        # 3.04 B parameters are read per token, at 4 to 16 bits each.
        self.assertTrue(1.5e9 < slow["bytes_per_token"] < 6.1e9)
        self.assertLess(slow["bf16_tokens_per_second"], slow["tokens_per_second"])

    def test_sparse_weights_count_as_devices_hold_them(self) -> None:
        config = CONFIGS / "qwen3-30b-a3b.json"

        def sizes(choice: str) -> tuple[int, int, int]:
            plan = self.document("plan", config, "--bandwidth", 100, "--memory", "1GB",
                                 "--recipe", f"uniform:{choice}")
            return (plan["bytes"], plan["decode"]["bytes_per_token"],
                    plan["placement"]["resident_bytes"])

        for dense_size, sparse_size in zip(sizes("s4/g64"), sizes("s4/g64/2:4"), strict=True):
            self.assertLess(sparse_size, dense_size)
        dense, sparse = sizes("s8/g64"), sizes("s8/g64/2:4")
        self.assertLess(sparse[0], dense[0])
        self.assertEqual(sparse[1:], dense[1:])  # Preparation expands 8 bits.

    def test_placement(self) -> None:
        def place(name: str, memory: str, *more: object) -> dict[str, int]:
            plan = self.document("plan", CONFIGS / f"{name}.json", "--bandwidth", 1, "--memory",
                                 memory, *more)
            placement: dict[str, int] = plan["placement"]
            if placement["experts"]:
                routed = sum(row["bytes"] for row in plan["classes"]
                             if row["layer_class"] == "moe_expert")
                others = (placement["kv_cache_bytes"] + placement["expanded_bytes"]
                          + placement["state_bytes"])
                # A device may hold the 6 bits of the head as 8.
                wider = sum(row["parameters"] // 4 for row in plan["classes"]
                            if row["layer_class"] == "lm_head")
                self.assertEqual(placement["resident_bytes"] - others,
                                 plan["bytes"] - routed + wider)
                share = 1 - placement["device_experts"] / placement["experts"]
                self.assertAlmostEqual(placement["host_bytes"], share * routed, delta=1)
            return placement

        whole = place("qwen3-30b-a3b", "24GB")
        self.assertTrue(whole["fits"])
        self.assertEqual((whole["experts"], whole["device_experts"]), (128, 128))
        self.assertEqual((whole["host_bytes"], whole["context_tokens"]), (0, 4096))
        part = place("qwen3-30b-a3b", "12GB", "--context", 32768)
        self.assertTrue(0 < part["device_experts"] < 128)
        self.assertEqual(part["kv_cache_bytes"], 8 * whole["kv_cache_bytes"])
        small = place("qwen3-30b-a3b", "12GB", "--context", 32768, "--kv-cache", "fp8_e4m3")
        self.assertEqual(2 * small["kv_cache_bytes"], part["kv_cache_bytes"])
        self.assertGreater(small["device_experts"], part["device_experts"])
        # One more expert of every layer would not fit.
        each = part["host_bytes"] / (128 - part["device_experts"])
        used = part["resident_bytes"] + part["device_experts"] * each
        self.assertTrue(used <= 12e9 < used + each)
        self.assertAlmostEqual(part["host_bytes_per_token"], part["host_bytes"] / 16, delta=1)
        self.assertFalse(place("deepseek-v3", "1GiB")["fits"])
        # Prefill of MLA expands latents to 128 heads of 192 + 128 features, in bounded memory.
        self.assertEqual(place("deepseek-v3", "1TB", "--context", 2048)["expanded_bytes"],
                         2048 * 128 * 320 * 2)
        self.assertEqual(place("deepseek-v3", "1TB", "--context", 32768)["expanded_bytes"], 2**29)
        self.assertEqual(whole["expanded_bytes"], 0)
        self.assertEqual(place("llama-3-8b", "8GB")["experts"], 0)
        for name, memory, says in (("qwen3-30b-a3b", "24GB", "all experts fit next to it"),
                                   ("mixtral-8x7b", "16GB", "stay on the host"),
                                   ("gpt-oss-120b", "1GB", "does not fit 1 GB"),
                                   ("deepseek-v3", "1TB", "heads that prefill expands latents to"),
                                   ("llama-3-8b", "24GB", "in 24 GB: the model takes")):
            text = self.succeed("plan", CONFIGS / f"{name}.json", "--bandwidth", 1, "--memory",
                                memory)
            self.assertIn(says, text.replace(".00 ", " "))
        self.refuse(USAGE, "plan", QWEN, "--memory", "24 GB",
                    says=("--memory: expected a size such as 5GB, got '24 GB'",))
        self.refuse(USAGE, "plan", QWEN, "--context", 5, says=("--context: needs --memory",))

    def test_recurrent_states_count_once_per_sequence(self) -> None:
        config = self.directory / "config.json"
        config.write_text(json.dumps({
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
            "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 2,
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "intermediate_size": 5632}))
        arguments = ("plan", config, "--bandwidth", 1, "--memory", "100GB", "--context")
        # 36 of 48 layers: three inputs of 8192 channels, and 32 heads of 128 x 128.
        state = 36 * (3 * 8192 + 32 * 128 * 128) * 4
        placements = [self.document(*arguments, context)["placement"] for context in (1000, 2000)]
        for placement, tokens in zip(placements, (1000, 2000), strict=True):
            self.assertEqual(placement["state_bytes"], 2 * state)
            self.assertEqual(placement["kv_cache_bytes"], tokens * 12 * 2 * 2 * 256 * 2)
        self.assertEqual(placements[1]["resident_bytes"] - placements[0]["resident_bytes"],
                         placements[0]["kv_cache_bytes"])
        document = self.document(*arguments, 1000)
        self.assertEqual(document["state_bytes_per_sequence"], state)
        text = self.succeed(*arguments, 1000)
        self.assertIn("recurrent state in f32: 79.04 MB per sequence", text)
        self.assertIn("two recurrent states (158.07 MB)", text)

    def test_bandwidth_is_measured_when_not_given(self) -> None:
        decode = self.document("plan", QWEN)["decode"]
        self.assertEqual(decode["bandwidth_source"], "measured")
        self.assertGreater(decode["bandwidth_gbps"], 0)
        self.assertIn("measured on this machine", self.succeed("plan", QWEN))

    def test_matches_the_files_of_the_sample_models(self) -> None:
        for source in (QWEN, GLM):
            plan = self.document("plan", source, "--bandwidth", 1)
            listing = self.document("inspect", source)
            self.assertEqual(plan["parameters"], listing["parameters"])

    def test_headers_answer_where_the_config_does_not(self) -> None:
        """An unknown architecture with weights, and weights without a config.json."""
        keys = ("parameters", "active_parameters", "bytes", "bits_per_weight", "classes", "decode")
        known = self.document("plan", QWEN, "--bandwidth", 1)
        source = self.directory / "source"
        source.mkdir()
        for name in ("model.safetensors", "config.json"):
            shutil.copyfile(QWEN / name, source / name)
        config = json.loads((source / "config.json").read_text())
        config["model_type"] = "qwen99_moe"
        (source / "config.json").write_text(json.dumps(config))
        other = self.document("plan", source, "--bandwidth", 1)
        self.assertEqual([other[key] for key in keys], [known[key] for key in keys])
        self.assertEqual(other["model_type"], "qwen99_moe")
        self.assertEqual(len(other["layers"]), 4)
        del config["num_experts_per_tok"]
        (source / "config.json").write_text(json.dumps(config))
        self.refuse(USAGE, "plan", source, "--bandwidth", 1, says=("qwen99_moe",))
        self.refuse(MALFORMED, "plan", QWEN / "model.safetensors", "--bandwidth", 1,
                    says=("experts",))
        write_safetensors(self.directory / "dense.safetensors",
                          {"model.layers.0.mlp.up_proj.weight": ("F32", [16, 32], bytes(2048))})
        dense = self.document("plan", self.directory / "dense.safetensors", "--bandwidth", 1)
        self.assertEqual(dense["parameters"], 512)
        self.assertEqual(dense["quantized_parameters"], 512)

    def test_prediction_layers_are_told_apart(self) -> None:
        plan = self.document("plan", CONFIGS / "glm-4.5-air.json", "--bandwidth", 1)
        self.assertAlmostEqual((plan["parameters"] + plan["prediction_parameters"]) * 1e-9, 110.5,
                               delta=0.5)
        text = self.succeed("plan", CONFIGS / "glm-4.5-air.json", "--bandwidth", 1)
        self.assertIn("multi-token-prediction", text)

    def test_recipes(self) -> None:
        config = CONFIGS / "llama-3-8b.json"
        self.assertEqual(self.document("plan", config, "--bandwidth", 1)["recipe"],
                         "default_dense")
        kept = self.document("plan", config, "--bandwidth", 1, "--override", ".=keep")
        self.assertEqual(kept["bits_per_weight"], 16)
        self.assertEqual(kept["quantized_parameters"], 0)
        small = self.document("plan", config, "--bandwidth", 1, "--format", "nf3",
                              "--group-size", 64)
        self.assertTrue(3.2 < small["bits_per_weight"] < 5.1)

    def test_wrong_configs(self) -> None:
        path = self.directory / "config.json"
        for content, code, text in (
                ("", MALFORMED, "config.json"),
                ("{", MALFORMED, "config.json"),
                ("{}", MALFORMED, "model_type"),
                (json.dumps({"model_type": "bert"}), USAGE, "'bert'"),
                (json.dumps({"model_type": "llama"}), MALFORMED, "hidden_size"),
                (json.dumps({"model_type": "llama", "hidden_size": -1}), MALFORMED, "-1"),
        ):
            path.write_text(content)
            self.refuse(code, "plan", path, "--bandwidth", 1, says=(text,))
            self.refuse(code, "plan", self.directory, "--bandwidth", 1, says=(text,))
        path.unlink()
        self.refuse(USAGE, "plan", self.directory, "--bandwidth", 1, says=(str(self.directory),))
        self.refuse(IO, "plan", self.directory / "absent.json", says=("absent.json",))
        self.refuse(USAGE, "plan", QWEN, "--bandwidth", "0", says=("--bandwidth",))
        self.refuse(USAGE, "plan", QWEN, "--bandwidth", "nan", says=("--bandwidth",))
        self.refuse(USAGE, "plan", QWEN, "--device", "cuda:0", says=("cuda:0",))


if __name__ == "__main__":
    unittest.main()
