// SPDX-License-Identifier: MIT
#pragma once

#include <diffattn/kv_cache.hpp>

namespace hostile {

/// Entry b to sequence b.
diffattn::status append(diffattn::kv_cache& cache, const diffattn::tensor_view<float>& k,
                        const diffattn::tensor_view<float>& v);

}  // namespace hostile
