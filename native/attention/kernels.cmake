# Attention sums: one file per instruction set, compiled for it alone and chosen at run time (attention/block.cpp). Sums of
# exponentials need no stated order, so multiply and add may be contracted here.
set(attention_files native/attention/sums.cpp native/attention/block.cpp native/attention/tile_f32_portable.cpp)
set_source_files_properties(native/attention/tile_f32_portable.cpp PROPERTIES COMPILE_OPTIONS "-ffp-contract=fast")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(native/attention/tile_f32_avx2.cpp PROPERTIES COMPILE_OPTIONS
                              "-mavx2;-mfma;-ffp-contract=fast")
  set_source_files_properties(native/attention/tile_f32_avx512.cpp PROPERTIES COMPILE_OPTIONS
                              "-mavx512f;-mfma;-ffp-contract=fast")
  list(APPEND attention_files native/attention/tile_f32_avx2.cpp native/attention/tile_f32_avx512.cpp)
endif()
target_sources(twinkv PRIVATE ${attention_files})
