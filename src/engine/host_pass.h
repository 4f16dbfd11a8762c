// The part of a pass that the host runs: the model's first layers.
#pragma once

#include "engine/forward.h"
#include "engine/forward_call.h"
#include "engine/model_impl.h"
#include "engine/pass_upload.h"
#include "marlin/status.h"

namespace marlin {

class HostPass {
 public:
  /// For a model with Model::Impl::host, in an arena of that part. Everything must outlive it.
  HostPass(const Model::Impl& model, Arena& arena, const Wanted& wanted);

  /// Runs rows through the host's layers. A device may still be busy with the pass before.
  Status Run(const PassRows& rows);
  /// Copies what the device's layers read to the values of their pass.
  Status Give(Pass* pass) const;

 private:
  const Model::Impl& host_;
  const ArenaScope scope_;
  Pass pass_;
};

}  // namespace marlin
