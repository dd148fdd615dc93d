// What Python holds of a rank's UCX. Not the worker itself: its last reference may be that of
// a wire.

#pragma once

#include <memory>

#include "net/ucx_worker.hpp"

struct UcxHolder {
  std::shared_ptr<unisono::UcxWorker> worker;
};
