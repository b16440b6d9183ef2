# A unity build (CMAKE_UNITY_BUILD, as in the preset default) compiles several sources at once, and
# they share one unnamed namespace. The sources below are compiled alone: their unnamed namespace has a
# name that another source of their target uses too, or Highway includes them once for each
# instruction set.
if(NOT CMAKE_UNITY_BUILD)
  return()
endif()

# annulus_alone(<target> <sources...>), relative to the target's folder
function(annulus_alone target)
  get_target_property(folder ${target} SOURCE_DIR)
  list(TRANSFORM ARGN PREPEND ${folder}/)
  set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target}
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

annulus_alone(annulus_core tensor/convert.cpp cuda/no_foreign_stream.cpp)
annulus_alone(annulus_mesh topology/gpu_binding.cpp)
annulus_alone(annulus_partition specs/sharding_rules.cpp)
annulus_alone(annulus_attention
  flash/flash_implementation.cpp native/row_dropout.cpp native/row_gradients.cpp
  native/row_scores.cpp native/row_softmax.cpp mask/visible_part.cpp)
if(ANNULUS_HAS_CUDNN)
  annulus_alone(annulus_attention cudnn/sdpa_plan.cpp)
endif()
annulus_alone(annulus_ring
  cost/prices.cpp planner/planner.cpp recommend/recommend.cpp schedules/backward/ring_gradients.cpp
  schedules/building/results.cpp schedules/ring.cpp simulation/simulation.cpp tuning/autotune.cpp
  tuning/candidates.cpp tuning/file.cpp tuning/text.cpp)
if(TARGET annulus_launcher)
  annulus_alone(annulus_files formats/safetensors.cpp)
  annulus_alone(annulus_verification
    gradient_verification.cpp non_finite_entries.cpp normal_numbers.cpp)
  annulus_alone(annulus_launcher
    bench/bench_report.cpp bench/calibration/read_rate.cpp commands/plan.cpp options/effects.cpp
    options/options.cpp planning/recommend.cpp planning/simulate_plan.cpp)
endif()
if(ANNULUS_BUILD_TESTS)
  annulus_alone(test_core device_wait_test.cpp host_stream_test.cpp)
  annulus_alone(test_partition
    partition_spec_test.cpp result_sharding_test.cpp sequence_layout_test.cpp)
  annulus_alone(test_attention
    mask/mask_test.cpp softmax_state_test.cpp unnormalised_test.cpp)
  annulus_alone(test_native
    native/native_test.cpp oracle/oracle_test.cpp problem/scores_test.cpp problem/sinks_test.cpp
    vanilla/vanilla_test.cpp)
  if(TARGET test_cuda_kernels)
    annulus_alone(test_cuda_kernels
      flash/cuda_flash_backward_general_test.cpp flash/cuda_flash_backward_masks_test.cpp
      flash/cuda_flash_backward_test.cpp flash/cuda_flash_decode_test.cpp)
    if(ANNULUS_HAS_CUDNN)
      annulus_alone(test_cuda_kernels cudnn/cuda_sdpa_backward_test.cpp)
    endif()
  endif()
  annulus_alone(test_ring simulation/simulation_events_test.cpp)
  annulus_alone(test_ring_ranks
    reproducible_test.cpp runner/runner_test.cpp sharded_attention_test.cpp)
  annulus_alone(test_launcher_ranks commands/verify_test.cpp verification/verification_test.cpp)
endif()
