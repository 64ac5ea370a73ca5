// SPDX-License-Identifier: MIT
#pragma once

// Everything a user needs. Engines without Eigen include what they use instead.

#include "attention.hpp"
#include "eigen.hpp"
#include "forward.hpp"
#include "kv_cache.hpp"
#include "merge.hpp"
#include "models/axolotl.hpp"
#include "models/layer.hpp"
#include "models/llama.hpp"
#include "models/motif.hpp"
#include "models/phi4flash.hpp"
#include "models/unilm.hpp"
#include "models/vision.hpp"
#include "rope.hpp"
