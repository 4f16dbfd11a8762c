#include "engine/host_pass.h"

#include "base/macros.h"

namespace marlin {

HostPass::HostPass(const Model::Impl& model, Arena& arena, const Wanted& wanted)
    : host_(*model.host), scope_(arena), pass_{host_.device,   host_.decoder, *host_.pool,
                                               host_.products, arena,         wanted.routing} {
  pass_.timer = wanted.timer;
}

Status HostPass::Run(const PassRows& rows) {
  if (pass_.timer != nullptr) MARLIN_RETURN_IF_ERROR(pass_.timer->BeginPass());
  const Wanted nothing;
  PassRows own;
  own.ids = rows.ids;
  own.positions = rows.positions;
  own.first_rows = rows.first_rows;
  own.caches = rows.caches;
  own.sequences = rows.sequences;
  PassUpload upload(host_, nothing, own);
  MARLIN_RETURN_IF_ERROR(upload.Send(pass_.arena, &pass_.values));
  MARLIN_RETURN_IF_ERROR(TakeValues(&pass_));
  MARLIN_RETURN_IF_ERROR(host_.program.Run(pass_));
  MARLIN_RETURN_IF_ERROR(CompleteHidden(pass_));
  return host_.device.Synchronize();
}

Status HostPass::Give(Pass* pass) const {
  Arena& arena = pass->arena;
  MARLIN_RETURN_IF_ERROR(arena.Fill(pass->values.hidden, pass_.values.hidden.data()));
  if (!pass_.layer_embeddings.empty()) {
    MARLIN_RETURN_IF_ERROR(arena.Fill(pass->layer_embeddings, pass_.layer_embeddings.data()));
  }
  pass->timer = pass_.timer;
  return Ended(*pass, StepPart::kCopy);
}

}  // namespace marlin
