"""Why a key of a DeepSpeed config has no counterpart here.

Owns: the reasons, by dotted key; `table.*` stands for all keys of a table without a reason of their
own. Does not own: the keys that have one (`deepspeed`).
"""

from typing import Final

UNKNOWN: Final = "is not among the keys of DeepSpeed that are known here"
_XLA: Final = "XLA plans buffers and overlaps communication; `plan` says what comes of it"
_OFFLOAD: Final = "[offload] says what rests on the host: optimizer, master, parameters, update"
_KERNEL: Final = "XLA makes the kernels"
_NOT_HERE: Final = "has no counterpart in this version"
_MEASURED: Final = "metrics.jsonl, timeline.jsonl and `shardtrain report` always have it"
_REMAT: Final = 'recomputation is a key here: train.remat = "full", "dots" or names of tensors'
_STAGES: Final = "stages are mesh.pipeline, and [pipeline] says who has which layers"
_GRADIENTS: Final = "gradients are summed as sums and weights, so no factor is needed"
_COMPRESSED: Final = "traffic is not compressed in this version"

REASONS: Final[dict[str, str]] = {
    "optimizer.legacy_fusion": _KERNEL,
    "optimizer.params.*": "is no parameter that ours has",
    "optimizer.params.torch_adam": _KERNEL,
    "optimizer.params.fused": _KERNEL,
    "optimizer.params.adam_w_mode": "is chosen by optimizer.name: adamw or adam",
    "optimizer.params.amsgrad": _NOT_HERE,
    "optimizer.params.bias_correction": "is always done here",
    "scheduler.params.last_batch_iteration": "a checkpoint says where a run goes on",
    "bf16.*": "masters are float32 here, and gradients are added up in float32",
    "bfloat16.*": "masters are float32 here, and gradients are added up in float32",
    "fp16.*": "masters are float32 here, and the loss scale is train.loss_scale",
    "torch_autocast": "train.precision is one for the whole step",
    "amp": "train.precision says it; apex has no counterpart",
    "zero_optimization.offload_optimizer.*": "copies are planned by XLA, layer by layer",
    "zero_optimization.offload_param.*": "each layer comes for its own use, and the next with it",
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_params": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.super_offload": _OFFLOAD,
    "zero_optimization.zenflow": _OFFLOAD,
    "zero_optimization.zero_hpz_partition_size": "a second copy within a node is not kept; "
    "mesh.replica keeps whole copies of the sharded state",
    "zero_optimization.zero_quantized_weights": _COMPRESSED,
    "zero_optimization.zero_quantized_gradients": _COMPRESSED,
    "zero_optimization.zero_quantized_nontrainable_weights": _COMPRESSED,
    "zero_optimization.elastic_checkpoint": "every checkpoint is read on any mesh",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints hold whole "
    "parameters, read on any mesh; `shardtrain export` writes them for others",
    "zero_optimization.gather_16bit_weights_on_model_save": "checkpoints hold whole parameters",
    "zero_optimization.load_from_fp32_weights": "masters are always restored",
    "zero_optimization.ignore_unused_parameters": "a parameter without gradient is no error here",
    "zero_optimization.*": _XLA,
    "zero_allow_untested_optimizer": "every optimizer works at every ZeRO stage",
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "communication_data_type": "gradients travel in the dtype that they are computed in",
    "seq_parallel_communication_data_type": "follows train.precision",
    "prescale_gradients": _GRADIENTS,
    "gradient_predivide_factor": _GRADIENTS,
    "gradient_accumulation_dtype": "gradients are added up in float32",
    "data_types.*": "gradients are added up in float32",
    "data_types": "gradients are added up in float32",
    "sparse_gradients": "the gradient of the embedding is summed where its rows rest",
    "sparse_attention": _NOT_HERE,
    "disable_allgather": _XLA,
    "dump_state": "`shardtrain config` prints every key",
    "wall_clock_breakdown": _MEASURED,
    "memory_breakdown": "`shardtrain plan` and the compile line of metrics.jsonl have it",
    "flops_profiler": "`shardtrain plan` counts FLOPs; mfu is in every row of metrics.jsonl",
    "comms_logger": "`shardtrain plan --compile` lists the collectives of the step",
    "csv_monitor": "metrics.jsonl has every number of every step",
    "comet": "trackers are tensorboard, wandb and mlflow",
    "tensorboard.*": "a tracker's files lie in the run's folder, under the run's name",
    "wandb.*": "a tracker's files lie in the run's folder, under the run's name",
    "activation_checkpointing": _REMAT,
    "pipeline": _STAGES,
    "tensor_parallel.*": "mesh.tensor splits heads, MLP width and vocabulary by rules",
    "sequence_parallel_size": "mesh.context splits sequences, where this version allows it",
    "autotuning": "`shardtrain plan` ranks layouts without a run",
    "elasticity": "a run goes on with another number of devices, at the same batch",
    "data_efficiency": _NOT_HERE,
    "curriculum_learning": _NOT_HERE,
    "progressive_layer_drop": _NOT_HERE,
    "eigenvalue": _NOT_HERE,
    "compression_training": _NOT_HERE,
    "hybrid_engine": _NOT_HERE,
    "compile": "the step is always compiled",
    "checkpoint": "checkpoints are complete or absent, and read on any mesh: [checkpoint]",
    "nebula": "saves are in the background always",
    "aio": _OFFLOAD,
    "dataloader_drop_last": "the last batch of an epoch is filled from the next one",
    "use_data_before_expert_parallelism": "there is no mixture of experts in this version",
    "graph_harvesting": _KERNEL,
    "checkpoint_parallel_write_pipeline": "each process writes its own part always",
    "train_micro_batch_size_per_gpu": "data.batch_size / train.microbatches on all devices",
}
