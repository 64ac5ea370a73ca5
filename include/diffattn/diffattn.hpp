// SPDX-License-Identifier: MIT
#pragma once

// Everything a user needs. Engines without Eigen include forward.hpp and attention.hpp instead.

#include "attention.hpp"
#include "eigen.hpp"
#include "forward.hpp"
