#include "backends/metal/apple/pipeline_archive.h"

#include <filesystem>
#include <system_error>
#include <utility>

namespace marlin::metal {
namespace {

constexpr std::string_view kName = "pipelines";
/// Processes that end early have saved some, and later saves become rare.
constexpr int64_t kFirstSave = 32;

NS::URL* UrlOf(const std::filesystem::path& path) {
  return NS::URL::fileURLWithPath(MakeText(path.string()));
}

/// The saved archive, or an empty one.
NS::SharedPtr<MTL::BinaryArchive> Open(MTL::Device* device, const std::filesystem::path& path) {
  const AutoreleaseScope scope;
  const auto make = [&](bool saved) {
    const NS::SharedPtr<MTL::BinaryArchiveDescriptor> descriptor =
        NS::TransferPtr(MTL::BinaryArchiveDescriptor::alloc()->init());
    if (saved) descriptor->setUrl(UrlOf(path));
    NS::Error* error = nullptr;
    return NS::TransferPtr(device->newBinaryArchive(descriptor.get(), &error));
  };
  std::error_code ignored;
  NS::SharedPtr<MTL::BinaryArchive> archive;
  if (std::filesystem::exists(path, ignored)) archive = make(true);
  return archive.get() != nullptr ? archive : make(false);
}

}  // namespace

PipelineArchive::PipelineArchive(NS::SharedPtr<MTL::Device> device, const KernelCache& cache)
    : device_(std::move(device)), cache_(cache), save_after_(kFirstSave) {
  const std::filesystem::path path = cache.PathOf(kName);
  if (!path.empty()) archive_ = Open(device_.get(), path);
}

PipelineArchive::~PipelineArchive() {
  const std::lock_guard lock(mutex_);
  if (added_ > 0) Save();
}

NS::SharedPtr<MTL::ComputePipelineState> PipelineArchive::Make(
    MTL::ComputePipelineDescriptor* descriptor, NS::Error** error) {
  const auto make = [&](MTL::PipelineOption options) {
    return NS::TransferPtr(device_->newComputePipelineState(descriptor, options, nullptr, error));
  };
  if (archive_.get() == nullptr) return make(MTL::PipelineOptionNone);
  descriptor->setBinaryArchives(NS::Array::array(archive_.get()));
  NS::SharedPtr<MTL::ComputePipelineState> pipeline =
      make(MTL::PipelineOptionFailOnBinaryArchiveMiss);
  if (pipeline.get() != nullptr) return pipeline;
  pipeline = make(MTL::PipelineOptionNone);
  if (pipeline.get() == nullptr) return pipeline;
  const std::lock_guard lock(mutex_);
  NS::Error* ignored = nullptr;
  if (archive_->addComputePipelineFunctions(descriptor, &ignored)) ++added_;
  if (added_ == save_after_) {
    Save();
    save_after_ *= 2;
  }
  return pipeline;
}

void PipelineArchive::Save() {
  const AutoreleaseScope scope;
  added_ = 0;
  cache_.Replace(kName, [this](const std::filesystem::path& path) {
    NS::Error* error = nullptr;
    return archive_->serializeToURL(UrlOf(path), &error);
  });
}

}  // namespace marlin::metal
