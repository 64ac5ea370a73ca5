// SPDX-License-Identifier: MIT
#pragma once

// Everything a user needs. Engines without Eigen include what they use instead.

#include "attention.hpp"
#include "eigen.hpp"
#include "forward.hpp"
#include "kv_cache.hpp"
#include "merge.hpp"
#include "rope.hpp"
