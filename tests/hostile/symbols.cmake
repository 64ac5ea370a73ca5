# SPDX-License-Identifier: MIT
# Objects of one program that are compiled for different processors must not share code: the linker keeps one copy of a symbol
# that both define, and may keep the one that the older processor cannot run. So the rule is that they share nothing: of the weak
# symbols that both objects define, each must carry its instruction set in its name, and then the names differ. Whether the code
# of a shared symbol happens to be harmless is not asked, since the next compiler may vectorise it.
#
#   cmake -DCOMPILER=c++ -DNM=nm -DFLAGS=-I... -DSOURCE=symbols.cpp -DDIRECTORY=... -P symbols.cmake

cmake_minimum_required(VERSION 3.25)

# Data and calls of the compilers, without arithmetic.
set(allowed "^(DW\\.ref\\.__gxx_personality_v0|__clang_call_terminate)$")

function(weak_symbols object result)
  execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]+" lines "${text}")
  list(TRANSFORM lines REPLACE "^[0-9a-f]+ . " "")
  set(${result} ${lines} PARENT_SCOPE)
endfunction()

# -O1 inlines least of the levels for which config.hpp promises this.
foreach(isa IN ITEMS x86-64 x86-64-v3)
  set(object "${DIRECTORY}/symbols_${isa}.o")
  execute_process(COMMAND "${COMPILER}" -std=c++17 -O1 -march=${isa} ${FLAGS} -c "${SOURCE}" -o "${object}"
                  COMMAND_ERROR_IS_FATAL ANY)
  weak_symbols("${object}" symbols_${isa})
  list(LENGTH symbols_${isa} count)
  if(count LESS 20)
    message(FATAL_ERROR "${object}: only ${count} weak symbols, so nothing is compared")
  endif()
endforeach()
foreach(symbol IN LISTS symbols_x86-64)
  if(symbol IN_LIST symbols_x86-64-v3 AND NOT symbol MATCHES "${allowed}")
    message(SEND_ERROR "both objects define ${symbol}")
  endif()
endforeach()
