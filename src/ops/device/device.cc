#include "ops/device/device.h"

#include <algorithm>
#include <new>

#include "backends/cpu/cpu_backend.h"
#include "backends/cuda/cuda_backend.h"
#include "backends/metal/metal_backend.h"
#include "base/aligned_buffer.h"
#include "base/environment.h"
#include "base/macros.h"
#include "base/printable.h"
#include "base/thread_pool.h"

namespace marlin {

Device::Impl::~Impl() {
  for (const Workspace& workspace : spare_) backend_->Free(workspace.data);
}

Result<Workspace> Device::Impl::TakeWorkspace(void* stream, int64_t bytes) {
  // Recorded work uses its workspaces again, so that they stay apart from others.
  if (backend_->calls_block() && !backend_->records()) stream = nullptr;
  Workspace found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto same = std::find_if(spare_.begin(), spare_.end(), [&](const Workspace& workspace) {
      return workspace.stream == stream;
    });
    if (same != spare_.end()) {
      found = *same;
      spare_.erase(same);
    }
  }
  if (found.data != nullptr && found.bytes >= bytes) return found;
  if (found.data != nullptr) backend_->Free(found.data);
  // Never 0 bytes, so that a later, larger call finds a workspace to replace.
  const int64_t size = std::max<int64_t>(bytes, kBufferAlignment);
  MARLIN_ASSIGN_OR_RETURN(void* data, backend_->Allocate(size));
  return Workspace{data, size, stream};
}

void Device::Impl::ReturnWorkspace(const Workspace& workspace) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_.push_back(workspace);
}

void Device::Impl::FreeWorkspaces(void* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(spare_, [&](const Workspace& workspace) {
    if (workspace.stream != stream) return false;
    backend_->Free(workspace.data);
    return true;
  });
}

Result<std::unique_ptr<HostStaging>> Device::Impl::TakeStaging(int64_t bytes) {
  std::unique_ptr<HostStaging> found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!spare_staging_.empty()) {
      found = std::move(spare_staging_.back());
      spare_staging_.pop_back();
    }
  }
  if (found != nullptr && found->bytes() >= bytes) {
    MARLIN_RETURN_IF_ERROR(found->Wait());
    return found;
  }
  found.reset();
  return backend_->AllocateStaging(std::max<int64_t>(bytes, kBufferAlignment));
}

void Device::Impl::ReturnStaging(std::unique_ptr<HostStaging> staging) {
  const std::lock_guard<std::mutex> lock(mutex_);
  spare_staging_.push_back(std::move(staging));
}

Result<std::optional<Device>> Device::Impl::Next() {
  const std::lock_guard<std::mutex> lock(next_mutex_);
  if (!next_ && open_next_) {
    MARLIN_ASSIGN_OR_RETURN(next_, open_next_());
  }
  return next_;
}

namespace {

/// Whether another device may be taken instead: this one is not there, or has no memory left.
bool IsPassedOver(const Status& status) {
  return status.code() == Code::kUnsupported || status.code() == Code::kOutOfMemory;
}

}  // namespace

Result<Device> OpenFirst(std::vector<std::function<Result<Device>()>> candidates,
                         std::string passed_over) {
  const std::function<Result<Device>()> open = std::move(candidates.front());
  candidates.erase(candidates.begin());
  Result<Device> device = open();
  if (device.ok()) {
    Device::Impl& impl = Internals::Impl(*device);
    impl.SetPassedOver(passed_over);
    if (candidates.empty()) return device;
    impl.SetNext(
        [rest = std::move(candidates), passed_over] { return OpenFirst(rest, passed_over); });
  } else if (!candidates.empty() && IsPassedOver(device.status())) {
    passed_over += (passed_over.empty() ? "" : "; ") + device.status().message();
    return OpenFirst(std::move(candidates), std::move(passed_over));
  }
  return device;
}

Result<const DecoderBackend*> DecoderOf(const Device& device) {
  const DecoderBackend* decoder = Internals::Impl(device).decoder();
  if (decoder != nullptr) return decoder;
  return Status(Code::kUnsupported,
                device.info().name + ": runs GEMMs only; open the model on \"cpu\"");
}

Status CheckHas(const Device& device, DecoderOperation operation) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  if (decoder->Has(operation)) return {};
  return Status(Code::kUnsupported, device.info().name + ": lacks the operation \"" +
                                        std::string(DecoderOperationName(operation)) + "\"");
}

Status CheckRunsItself(const Device& device, DecoderOperation operation) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  if (decoder->RunsItself(operation)) return {};
  return Status(Code::kUnsupported, device.info().name + ": has no kernel of the operation \"" +
                                        std::string(DecoderOperationName(operation)) + "\"");
}

namespace {

#ifdef __APPLE__
constexpr bool kOnMac = true;
#else
constexpr bool kOnMac = false;
#endif

bool IsCuda(std::string_view name) { return name == "cuda" || name.starts_with("cuda:"); }
bool IsMetal(std::string_view name) { return name == "metal" || name == "metal-sim"; }

Status CheckDeviceName(std::string_view name) {
  if (name == "cpu" || name == "auto" || IsCuda(name) || IsMetal(name)) return {};
  return Status(Code::kInvalidArgument, "device: unknown name '" + Printable(name) +
                                            "'; known: cpu, cuda, cuda:N, metal, metal-sim, auto");
}

Result<std::unique_ptr<Backend>> OpenBackend(std::string_view name, const DeviceOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckDeviceName(name));
  if (IsCuda(name)) return cuda::OpenCuda(name);
  return IsMetal(name) ? metal::OpenMetal(name) : cpu::OpenCpu(options);
}

Result<Device> DeviceOn(std::unique_ptr<Backend> backend, const DeviceOptions& options) {
  MARLIN_ASSIGN_OR_RETURN(
      Tuning tuning, LoadTuning(backend->ShippedTuning(), options.tuning_file, backend->Model()));
  auto impl = std::make_shared<Device::Impl>(std::move(backend), std::move(tuning));
  if (impl->backend().shares_memory()) {
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Backend> host, cpu::OpenCpu(options));
    impl->AddHost(std::move(host));
  }
  return Internals::Make<Device>(std::move(impl));
}

/// The current CUDA device, else the first one that is supported.
Result<Device> OpenAnyCuda(const DeviceOptions& options) {
  Result<Device> current = Device::Open("cuda", options);
  if (!IsPassedOver(current.status())) return current;
  for (int i = 0; i < cuda::DeviceCount(); ++i) {
    Result<Device> device = Device::Open("cuda:" + std::to_string(i), options);
    if (!IsPassedOver(device.status())) return device;
  }
  return current;
}

Result<Device> OpenAuto(const DeviceOptions& options) {
  std::vector<std::function<Result<Device>()>> candidates;
  if (cuda::DeviceCount() > 0) {
    candidates.emplace_back([options] { return OpenAnyCuda(options); });
  }
  // On a Mac whose build has no driver, the reason why the CPU is taken says so.
  if (kOnMac) candidates.emplace_back([options] { return Device::Open("metal", options); });
  candidates.emplace_back([options] { return Device::Open("cpu", options); });
  return OpenFirst(std::move(candidates));
}

}  // namespace

Result<std::string> DefaultDeviceName() {
  const auto named = ReadEnvironment("METAL_MARLIN_DEVICE");
  if (!named || named->value.empty()) return std::string("auto");
  MARLIN_RETURN_IF_ERROR(CheckDeviceName(named->value).WithContext(named->name));
  return named->value;
}

std::string DescribeDevice(const DeviceInfo& info) {
  std::string text = info.name + " (" + info.model;
  if (info.backend == "cpu") {
    text += ", " + std::to_string(info.threads) + (info.threads == 1 ? " thread" : " threads");
  }
  return text + ")";
}

Result<Device> Device::Open(std::string_view name, const DeviceOptions& options) {
  if (options.threads < 0) {
    return Status(Code::kInvalidArgument,
                  "threads: expected 0 or more, got " + std::to_string(options.threads));
  }
  try {
    if (name == "auto") return OpenAuto(options);
    MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, OpenBackend(name, options));
    return DeviceOn(std::move(backend), options);
  } catch (const ThreadStartError& error) {
    return Status(Code::kOutOfMemory, std::string("device: ") + error.what());
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "device: cannot allocate");
  }
}

DeviceInfo Device::info() const {
  DeviceInfo info = impl_->backend().Info();
  info.measured_products = impl_->tuning().size();
  info.tuning_file = impl_->tuning_file();
  info.passed_over = impl_->passed_over();
  info.host_operations = impl_->HostOperations();
  return info;
}

Status Device::Synchronize(void* stream) const { return impl_->backend().Synchronize(stream); }

Result<DeviceBuffer> DeviceBuffer::Allocate(const Device& device, int64_t bytes) {
  if (bytes < 0) {
    return Status(Code::kInvalidArgument,
                  "bytes: expected 0 or more, got " + std::to_string(bytes));
  }
  DeviceBuffer buffer;
  MARLIN_ASSIGN_OR_RETURN(void* data,
                          Internals::Impl(device).backend().Allocate(std::max<int64_t>(bytes, 1)));
  buffer.data_ = {data, Free{Internals::Shared(device)}};
  buffer.bytes_ = bytes;
  return buffer;
}

void DeviceBuffer::Free::operator()(void* data) const { device->backend().Free(data); }

namespace {

Status CheckRange(const void* host, int64_t bytes, int64_t offset, int64_t size) {
  if (bytes < 0 || offset < 0 || offset > size || bytes > size - offset) {
    return Status(Code::kInvalidArgument,
                  "copy: bytes " + std::to_string(offset) + " to " + std::to_string(offset) +
                      " + " + std::to_string(bytes) + " of a buffer of " + std::to_string(size));
  }
  if (bytes > 0 && host == nullptr) return Status(Code::kInvalidArgument, "host: null data");
  return Status();
}

}  // namespace

Status DeviceBuffer::CopyFrom(const void* host, int64_t bytes, int64_t offset) const {
  MARLIN_RETURN_IF_ERROR(CheckRange(host, bytes, offset, this->bytes()));
  if (bytes == 0) return Status();
  return data_.get_deleter().device->backend().CopyToDevice(
      static_cast<std::byte*>(data_.get()) + offset, host, bytes);
}

Status DeviceBuffer::CopyTo(void* host, int64_t bytes, int64_t offset) const {
  MARLIN_RETURN_IF_ERROR(CheckRange(host, bytes, offset, this->bytes()));
  if (bytes == 0) return Status();
  return data_.get_deleter().device->backend().CopyToHost(
      host, static_cast<const std::byte*>(data_.get()) + offset, bytes);
}

Status DeviceBuffer::CopyFromAsync(const void* host, int64_t bytes, int64_t offset,
                                   void* stream) const {
  MARLIN_RETURN_IF_ERROR(CheckRange(host, bytes, offset, this->bytes()));
  if (bytes == 0) return Status();
  return data_.get_deleter().device->backend().CopyToDeviceAsync(
      static_cast<std::byte*>(data_.get()) + offset, host, bytes, stream);
}

Status DeviceBuffer::CopyToAsync(void* host, int64_t bytes, int64_t offset, void* stream) const {
  MARLIN_RETURN_IF_ERROR(CheckRange(host, bytes, offset, this->bytes()));
  if (bytes == 0) return Status();
  return data_.get_deleter().device->backend().CopyToHostAsync(
      host, static_cast<const std::byte*>(data_.get()) + offset, bytes, stream);
}

std::vector<DeviceInfo> ListDevices(std::vector<Status>* refused) {
  std::vector<DeviceInfo> devices;
  if (Result<Device> device = Device::Open("cpu"); device.ok()) devices.push_back(device->info());
  for (int i = 0; i < cuda::DeviceCount(); ++i) {
    const Result<Device> device = Device::Open("cuda:" + std::to_string(i));
    if (device.ok()) {
      devices.push_back(device->info());
    } else if (refused != nullptr) {
      refused->push_back(device.status());
    }
  }
  if (auto backend = metal::ListMetal(); backend.ok()) {
    const Result<Device> device = DeviceOn(std::move(*backend), {});
    if (device.ok()) devices.push_back(device->info());
  }
  return devices;
}

}  // namespace marlin
