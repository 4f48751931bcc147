"""Mutations of promises about models: their names, downloads, refusals and memory."""

from mutation import Mutation

HUB, HUB_FILES = "tests/loading/huggingface/test_hub.py", "tests/loading/huggingface/test_hub_files.py"
INSPECT, FIT, STARTUP = (
    "tests/loading/test_model_report.py",
    "tests/workers/startup/test_fit.py",
    "tests/workers/startup/test_build.py",
)
PULL = "tests/cli/test_pull.py"
LARGER = "tests/workers/generation/test_larger_tokenizer.py"
FOLDERS = "tests/loading/huggingface/test_quantised_folders.py"
THEIRS = "tests/loading/injection/test_ktransformers.py"
CUSTOM = "tests/loading/injection/test_custom_operators.py"
PACKAGES = "tests/loading/injection/test_packages.py"

DECODER = "tests/operators/test_decoder.py::test_logits_equal_those_of_transformers"
REFUSED = "tests/loading/test_unsupported.py"


MODELS: dict[str, Mutation] = {
    "every expert counts every token": Mutation(
        "ktqueue/loading/calibrate.py",
        "(chosen == expert).nonzero(as_tuple=True)",
        "(chosen >= 0).nonzero(as_tuple=True)",
        ("tests/loading/test_calibrate.py::test_sums_are_those_of_the_inputs_in_transformers[folder]",),
    ),
    "value heads keep their order in files": Mutation(
        "ktqueue/loading/gguf/linear.py",
        "if not layout.tiled:\n            return values",
        "if True:\n            return values",
        ("tests/loading/gguf/test_linear.py::test_a_folder_is_written_as_llama_cpp_does[qwen3_5_text-qwen35]",),
    ),
    "an unsupported family is found after its weights": Mutation(
        "ktqueue/loading/huggingface/checkpoint.py",
        "    check_model_type(config, str(folder))\n",
        "",
        (f"{REFUSED}::test_a_folder_is_refused_by_its_config",),
    ),
    "a package's family may have any part": Mutation(
        "ktqueue/loading/packaged_families.py",
        "getattr(family, entry.name) != getattr(_PLAIN, entry.name):",
        "False:",
        (f"{PACKAGES}::test_a_family_that_is_wrong_is_named[latent]",),
    ),
    "the residual's factor leaves the epsilon as it is": Mutation(
        "ktqueue/operators/decoder_facts.py",
        "epsilons.pop() / added**2",
        "epsilons.pop()",
        (f"{DECODER}[granitemoe]",),
    ),
    "layers without a window rotate": Mutation(
        "ktqueue/operators/layer_facts.py",
        "bool(window) or not family.windows_rotated or ",
        "True or ",
        (f"{DECODER}[exaone_moe]",),
    ),
    "all experts share in the weights of Phi-3.5-MoE": Mutation(
        "ktqueue/operators/layer_facts.py",
        '        facts = {"jitter": float(router.router_jitter_noise)}\n',
        "        facts = {}\n",
        (f"{DECODER}[phimoe]",),
    ),
    "biases of norms are left out": Mutation(
        "ktqueue/operators/decoder_weights.py",
        '    if weights.has(f"{name}.bias"):',
        "    if False:",
        (f"{DECODER}[phimoe]",),
    ),
    "rotary rows of latents are not moved": Mutation(
        "ktqueue/operators/latent_weights.py",
        "        if not shape.interleaved:",
        "        if True:",
        (f"{DECODER}[deepseek_v2]",),
    ),
    "queries do not grow with their position": Mutation(
        "ktqueue/operators/latent_shape.py",
        "    if not shape.growth:",
        "    if True:",
        ("tests/operators/gpu/test_decoder.py::test_logits_equal_those_of_transformers[cpu-mistral4]",),
    ),
    "what a layer adds has no norm": Mutation(
        "ktqueue/operators/layer_facts.py",
        '"attention_out_norm": _POST_ATTENTION, "mlp_out_norm": _POST}',
        '"attention_out_norm": "", "mlp_out_norm": _POST}',
        ("tests/operators/test_decoder.py::test_logits_equal_those_of_transformers[afmoe]",),
    ),
    "all layers rotate alike": Mutation(
        "ktqueue/operators/layer_facts.py",
        "    table = rotary.kinds.index(config.layer_types[attention.layer_idx]) if rotary.kinds else 0\n",
        "    table = 0\n",
        (f"{DECODER}[gemma3]",),
    ),
    "values are not normalised": Mutation(
        "ktqueue/operators/layer_facts.py",
        'hasattr(attention, "v_norm")',
        "False",
        (f"{DECODER}[gemma4 with experts]",),
    ),
    "all layers are planned with the heads of the first": Mutation(
        "ktqueue/operators/gpu/attention/by_heads.py",
        "self._plans[self._kinds[layer]]",
        "self._plans[0]",
        ("tests/operators/gpu/attention/test_attention.py::test_each_layer_uses_the_plan_of_its_heads",),
    ),
    "norms are rounded before their weights": Mutation(
        "ktqueue/operators/gpu/kernels/norm.py",
        "normed if weight.dtype == torch.float32 else normed.to(x.dtype)",
        "normed.to(x.dtype)",
        (
            "tests/operators/gpu/test_decoder.py::"
            "test_half_precision_is_as_exact_as_in_transformers[gemma4 with experts-bfloat16-cpu]",
        ),
    ),
    "scores have no soft limit": Mutation(
        "ktqueue/operators/attention.py",
        "if type(module).__name__ in _CAPPED else 0.0",
        "if False else 0.0",
        (f"{DECODER}[gemma2]",),
    ),
    "the indexer's choice is not used": Mutation(
        "ktqueue/operators/indexer.py",
        "        if not has_choice(step, shape.chosen):",
        "        if True:",
        (
            "tests/loading/huggingface/test_config_check.py::test_an_indexer_chooses_the_keys_of_long_sequences",
            "tests/operators/gpu/test_decoder.py::test_logits_equal_those_of_transformers[cpu-glm_moe_dsa]",
        ),
    ),
    "the compiled decoder attends to all keys": Mutation(
        "ktqueue/operators/decoder.py",
        "                chosen=shape.indexer.chosen if shape.indexer else 0,",
        "                chosen=1 << 20,",
        (f"{DECODER}[deepseek_v32]",),
    ),
    "chunks have no borders": Mutation(
        "ktqueue/operators/attention.py",
        "    return int(config.attention_chunk_size) if",
        "    return 0 if",
        (f"{DECODER}[llama4]",),
    ),
    "weights multiply what experts add": Mutation(
        "ktqueue/operators/layer_facts.py",
        "weighted_input=self.router is not None and self.router.weighted_input)",
        "weighted_input=False)",
        (f"{DECODER}[llama4]",),
    ),
    "rules are found only by path": Mutation(
        "ktqueue/loading/rules.py",
        "        return shipped[rules]\n",
        "        return Path(rules)\n",
        ("tests/loading/test_rules.py::test_a_shipped_file_is_found_by_its_name",),
    ),
    "a derived rule file has the options of its base": Mutation(
        "ktqueue/loading/rules.py",
        "options=rule.options | values, ",
        "options=rule.options, ",
        (
            "tests/loading/test_rules.py::test_a_file_changes_the_options_of_its_base",
            "tests/loading/test_rules.py::test_the_other_shipped_files_change_the_default",
        ),
    ),
    "options of a class are not checked": Mutation(
        "ktqueue/operators/registry.py",
        "            inspect.signature(function).bind(*arguments, **keywords)",
        "            inspect.signature(function)",
        (f"{CUSTOM}::test_a_class_is_checked_when_its_rule_is_read[wrong options]",),
    ),
    "any class replaces a module": Mutation(
        "ktqueue/operators/registry.py",
        "    if not issubclass(found, Operator):",
        "    if False:",
        (f"{CUSTOM}::test_a_class_is_checked_when_its_rule_is_read[a plain module]",),
    ),
    "any operator may be on another device": Mutation(
        "ktqueue/loading/load.py",
        "operator_class(operators[ancestor]).any_device",
        "operator_class(operators[ancestor])",
        (f"{CUSTOM}::test_an_operator_says_whether_it_may_be_on_another_device",),
    ),
    "a step is captured with any operator": Mutation(
        "workers/startup/gpu_memory.py",
        "isinstance(module, Operator) and not module.capturable:",
        "isinstance(module, Operator) and False:",
        (f"{CUSTOM}::test_steps_are_captured_only_if_every_operator_allows_it",),
    ),
    "operators of packages are not closed": Mutation(
        "ktqueue/engine/gpu/device_model.py",
        "                    close()\n",
        "                    pass\n",
        (f"{CUSTOM}::test_a_norm_and_experts_of_a_package_give_the_same_tokens",),
    ),
    "KTransformers' second GPU is ignored": Mutation(
        "ktqueue/loading/ktransformers.py",
        're.fullmatch(r"cuda:\\d+", device):',
        're.fullmatch(r"cuda:\\d+", device) and False:',
        (f"{THEIRS}::test_lines_that_cannot_be_followed_are_named[a second GPU]",),
    ),
    "KTransformers' linear operator is not followed": Mutation(
        "ktqueue/loading/rules.py",
        'name = "quantised" if placement.dense == "quantised" else "default"',
        'name = "default"',
        (f"{THEIRS}::test_a_file_has_the_effect_of_our_rules",),
    ),
    "rules for a GPU are followed on the CPU": Mutation(
        "ktqueue/loading/rules.py",
        'gpu_source = f"{self._path}:1" if placement.on_gpu else None',
        "gpu_source = None",
        (f"{THEIRS}::test_rules_for_a_gpu_are_refused_on_the_cpu",),
    ),
    "any exception of load ends the worker": Mutation(
        "ktqueue/loading/materialize.py",
        "    except Exception as error:  # an operator",
        "    except ValueError as error:  # an operator",
        (f"{CUSTOM}::test_a_failure_of_a_package_names_its_rule_or_its_tensor",),
    ),
    "a download starts again": Mutation(
        "ktqueue/loading/huggingface/hub.py",
        'part.open("ab" if downloaded <= file.size else "wb")',
        'part.open("wb")',
        (f"{PULL}::test_a_killed_download_continues_and_the_model_is_served",),
    ),
    "a damaged beginning is kept": Mutation(
        "ktqueue/loading/huggingface/hub.py",
        "            if found != etag:\n",
        "            if not found:\n",
        (f"{HUB}::test_a_damaged_beginning_is_found_after_the_end",),
    ),
    "a full disk is found at the end": Mutation(
        "ktqueue/loading/huggingface/hub.py",
        "    if needed_bytes > free_bytes:\n",
        "    if free_bytes == 0:\n",
        (f"{HUB}::test_the_disk_must_have_room",),
    ),
    "weights are downloaded before the refusal": Mutation(
        "ktqueue/loading/huggingface/hub.py",
        '        if file.path.endswith(".safetensors"):  # the small files are downloaded already\n',
        "        if False:\n",
        (f"{HUB}::test_a_quantised_folder_is_refused_before_its_weights",),
    ),
    "pickles are downloaded": Mutation(
        "ktqueue/loading/huggingface/hub_files.py",
        '(("config.json", ',
        '(("pytorch_model.bin", "modeling_tiny.py", "modeling_fox.py", "config.json", ',
        (
            f"{HUB}::test_only_needed_files_of_a_folder_are_downloaded",
            f"{HUB_FILES}::test_only_the_files_that_a_folder_needs_are_chosen",
        ),
    ),
    "`up` starts processes before it checks the model": Mutation(
        "ktqueue/cli/up.py",
        "    config = with_model(config)\n",
        "",
        (f"{PULL}::test_nothing_is_started_for_an_unknown_name",),
    ),
    "the tokenizer is checked last": Mutation(
        "workers/startup/build.py",
        "        raise prepared.refusal\n    tokenizer = load_served_tokenizer(",
        "        raise prepared.refusal\n    load_prepared(prepared, progress)\n    tokenizer = load_served_tokenizer(",
        (f"{INSPECT}::test_a_folder_without_a_tokenizer_is_refused_before_its_weights",),
    ),
    "a worker serves more tokens than its model has": Mutation(
        "ktqueue/loading/tokenizer/tokenizer.py",
        "self.size = min(self.size, embeddings)",
        "pass",
        (
            f"{LARGER}::test_only_the_request_fails",
            f"{LARGER}::test_what_another_worker_wrote_is_checked",
            f"{LARGER}::test_it_says_so_at_its_start",
        ),
    ),
    "only another tokenizer says where answers end": Mutation(
        "ktqueue/loading/tokenizer/tokenizer.py",
        "() if other is None else _stated_ends(model)",
        "()",
        (f"{LARGER}::test_the_model_says_where_answers_end_whatever_its_tokenizer_says",),
    ),
    "inspect ignores the tokenizer": Mutation(
        "ktqueue/loading/model_report.py",
        "            load_tokenizer(tokenizer or path)\n",
        "            pass\n",
        (f"{INSPECT}::test_a_folder_without_a_tokenizer_is_refused_before_its_weights",),
    ),
    "rules spread a step over two devices": Mutation(
        "ktqueue/loading/load.py",
        "        _check_one_device(skeleton, plan, str(file), device)\n",
        "",
        (f"{INSPECT}::test_rules_that_spread_a_step_are_refused",),
    ),
    "a cache is larger than the memory": Mutation(
        "ktqueue/engine/memory_plan.py",
        "    return min(tokens * token_bytes, int(available * utilization))\n",
        "    return tokens * token_bytes\n",
        (
            f"{STARTUP}::test_an_error_says_that_memory_is_too_small_for_a_page",
            f"{FIT}::test_the_host_must_hold_the_weights",
        ),
    ),
    "workers take the memory many times": Mutation(
        "workers/supervision/supervisor.py",
        "host_memory_utilization / self._count",
        "host_memory_utilization",
        ("tests/e2e/test_supervisor.py::test_a_model_that_cannot_be_loaded_is_reported_at_once",),
    ),
    "the memory of a cache is written at the start": Mutation(
        "ktqueue/operators/kv_cache.py",
        '    if torch.device(device).type != "cpu":\n',
        "    if True:\n",
        ("tests/operators/test_kv_cache.py::test_host_memory_is_allocated_when_it_is_written",),
    ),
    "memory of other processes counts as free": Mutation(
        "workers/startup/fit.py",
        "chosen.gpu_memory_utilization - (gpu.total - gpu.free) / gpu.total",
        "chosen.gpu_memory_utilization",
        (f"{FIT}::test_memory_of_other_processes_is_not_used",),
    ),
    "`fit` ignores the memory of the host": Mutation(
        "workers/startup/fit.py",
        "    if sum(host.values()) > limit:\n",
        "    if False:\n",
        (f"{FIT}::test_the_host_must_hold_the_weights",),
    ),
    "zero points of GPTQ are as stored": Mutation(
        "ktqueue/loading/huggingface/quantisation.py",
        "zero_offset=1 if layout",
        "zero_offset=0 if layout",
        (f"{FOLDERS}::test_a_folder_has_the_weights_and_the_tokens_of_its_float32[gptq zeros]",),
    ),
    "codes of AWQ are in the order of their bits": Mutation(
        "ktqueue/loading/huggingface/quantised_blocks.py",
        "    return nibbles((even | odd << np.uint32(4)).view(np.uint8))",
        "    return nibbles(words.view(np.uint8))",
        (f"{FOLDERS}::test_a_folder_has_the_weights_and_the_tokens_of_its_float32[awq]",),
    ),
    "a reciprocal is a single number": Mutation(
        "ktqueue/loading/huggingface/quantised_blocks.py",
        "            return d, factor - d\n",
        "            return d, 0.0\n",
        (f"{FOLDERS}::test_a_folder_has_the_weights_and_the_tokens_of_its_float32[compressed nvfp4]",),
    ),
    "columns of GPTQ may be sorted": Mutation(
        "ktqueue/loading/huggingface/quantised_tensors.py",
        'not np.array_equal(order.data.view("<i4"), wanted)',
        'len(order.data.view("<i4")) != len(wanted)',
        (f"{FOLDERS}::test_values_that_cannot_be_held_are_refused_when_they_are_read[sorted]",),
    ),
    "scales may be rounded": Mutation(
        "ktqueue/loading/huggingface/quantised_blocks.py",
        "    if wrong.any():\n",
        "    if False:\n",
        (f"{FOLDERS}::test_values_that_cannot_be_held_are_refused_when_they_are_read[large scale]",),
    ),
}
