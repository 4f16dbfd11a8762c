// The parameters of the persistent decode kernel, and the layout of its shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/layout/device_views.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/layout/value_record.h"

namespace marlin::cuda {

/// The warps that compute; the warpgroup after them copies what they read: its first and last warp
/// weights and tables, the two between them keys.
inline constexpr int kPersistentThreads = 512;
inline constexpr int kPersistentWarps = kPersistentThreads / 32;
inline constexpr int kFirstKeyCopier = kPersistentThreads + 32;
inline constexpr int kKeyCopiers = 64;
inline constexpr int kPersistentBlock = kPersistentThreads + 128;
/// GEMMs of a layer, in the order in which they run.
inline constexpr int kPhases = 4;
enum class Phase : uint8_t { kQkv, kOut, kGates, kDown };

/// Groups of layers with the same pages, and the slabs of each.
inline constexpr int kMostCacheGroups = 2;
inline constexpr int kMostCacheSlabs = 64;
/// Limits of the kernel's registers and of its fixed parts of shared memory.
inline constexpr int kMostPersistentHidden = 8192;
inline constexpr int kMostHeadFeatures = 128;
inline constexpr int kMostHybridFeatures = 256;  ///< The same in the hybrid kernel.
inline constexpr int kMostGroupHeads = 16;       ///< Query heads of a KV head: the rows of an MMA.
inline constexpr int kMostChosenExperts = 16;
inline constexpr int kMostRouterRows = 4;  ///< Per CTA.
inline constexpr int kMostUnits = 16;      ///< Per phase and CTA: each output has a thread.

/// The forms of the kernel: one token of attention layers; one of a model with gated delta nets;
/// several next tokens of one or more texts, whose rows are columns of the same MMAs; one token of
/// attention layers with what would make the first form larger: shared experts, norms after RoPE,
/// teams of more warps where there is no memory for many; several rows of such layers, or of
/// routers that select by more than logits; or one token, or several rows, between the attention of
/// a layer and that of the next one, which run elsewhere (persistent_between.cuh).
enum class PersistentForm : uint8_t {
  kToken,
  kHybrid,
  kRows,
  kGeneral,
  kGeneralRows,
  kBetween,
  kBetweenRows
};
constexpr bool IsBetween(PersistentForm form) {
  return form == PersistentForm::kBetween || form == PersistentForm::kBetweenRows;
}
constexpr bool IsRows(PersistentForm form) {
  return form == PersistentForm::kRows || form == PersistentForm::kGeneralRows ||
         form == PersistentForm::kBetweenRows;
}
constexpr bool IsGeneral(PersistentForm form) {
  return form == PersistentForm::kGeneral || form == PersistentForm::kGeneralRows;
}
constexpr bool HasSharedExperts(PersistentForm form) {
  return form == PersistentForm::kHybrid || IsBetween(form) || IsGeneral(form);
}
/// The parts of a KV head's attention that every reader merges for itself: reading so few of them
/// costs less than another exchange.
constexpr int MostMergedByReaders(PersistentForm form) {
  return IsRows(form) || form == PersistentForm::kHybrid ? 1 : 4;
}
/// Whether a router's sigmoids are selected by in fp32, without its own code, which has doubles:
/// the forms of attention lack registers or room for that, except the general one of one row.
/// Choices that are nearly the same may differ.
constexpr bool HasSigmoids(PersistentForm form) {
  return IsBetween(form) || form == PersistentForm::kGeneral;
}
/// With at most this many rows, activations that are multiplied by 4-bit integers are integers of
/// several limbs (persistent_limbs.cuh). Other codes, and more rows, have activations in bf16.
inline constexpr int kMostLimbRows = 2;
inline constexpr int kLimbCount = 3;
constexpr bool HasLimbs(CodeKind kind, int rows) {
  return kind == CodeKind::kInt4 && rows <= kMostLimbRows;
}
/// Whether upper slots of the rings have a mixer's inputs meanwhile.
constexpr bool SharesRing(PersistentForm form) { return !IsRows(form) && !IsBetween(form); }
inline constexpr int kMostPersistentRows = 8;
/// Features of a latent, and of queries before their second projection: a thread has four.
inline constexpr int kMostLatentFeatures = 4 * kPersistentThreads;
/// Selected experts of all rows; units of a CTA, whose numbers have a byte.
inline constexpr int kMostTasks = kMostPersistentRows * kMostChosenExperts;
inline constexpr int kMostRowUnits = 255 - kPersistentWarps;
inline constexpr int kMostRowSplits = 32;
inline constexpr int kMostRowExperts = 1024;  ///< A warp selects: a lane has a bit for each of its.
/// Floats of a row of a unit's sums: the lanes of a warp store to different banks.
inline constexpr int kRowSumFloats = 36;

/// A gated delta net: value features of a CTA, of which a warp has two; inputs of the convolution;
/// the most features of a key.
inline constexpr int kDeltaColumns = 2 * kPersistentWarps;
inline constexpr int kDeltaConvWidth = 4;
inline constexpr int kMostDeltaKeys = 128;
/// Floats of a row of a state's columns in shared memory: rows begin in different banks.
inline constexpr int kDeltaRowFloats = kDeltaColumns + 4;
/// Sums of squares of a head: one for each of its CTAs, then zeros.
inline constexpr int kDeltaSquares = 4;

/// See PhaseGemm::segment_factor; k-tiles and tiles of a segment are below 2^10.
inline constexpr int kSegmentBits = 20;

/// One GEMM of a layer: units of work, which are dealt to the CTAs in equal runs.
///
///   unit = n-tile of 32 outputs x one of `splits` parts of k; in the order
///          [splits][copies][sides][strips]
///
/// Every unit publishes its 32 sums, and their readers add the splits in their order. Which units
/// and tiles a CTA has is computed by the host (persistent_plan.h), as a division takes a hundred
/// clocks, except where several rows select experts (persistent_deal_layout.h).
struct PhaseGemm {
  TileView weights;                   ///< The first side's; all sides have its layout.
  const uint8_t* up_tiles = nullptr;  ///< The second side's.
  float up_multiplier = 1;
  ParameterUse use = ParameterUse::kOneScale;
  const float* bias = nullptr;  ///< [sides][n] or null; of experts: see PersistentExpert.
  int n = 0;                    ///< Outputs of a side.
  int strips = 0;               ///< n-tiles of a side.
  int sides = 1;                ///< 2: a gate and an up matrix, or queries and latents.
  int up_n = 0;                 ///< Outputs of the second side, if it has not the first one's n.
  int copy_strips = 0;          ///< n-tiles of all sides; SplitPhase sets it.
  int copies = 1;               ///< Selected experts with outputs of their own.
  int segments = 1;             ///< Selected experts whose inputs are concatenated along k.
  /// With several rows: the most experts that they select, of which each is multiplied once; the
  /// copies or segments follow from those that they do select. 0: the phase is not one of experts.
  int most_selected = 0;
  int segment_factor = 0;  ///< The segment of k-tile t is t * this >> kSegmentBits.
  int k_tiles = 0;         ///< In all segments.
  int splits = 1;
  int tiles_of_split = 0;  ///< The last split may have fewer.
  int columns = 0;         ///< Sums of a split: copies x copy_strips x 32.
  int schedule = 0;        ///< Offset of the Schedule in a CTA's schedules.
  /// The first copy or segment that is the shared expert's; -1: none is. It may be as wide as
  /// several experts, of which each is a selection, and its tiles may have other groups.
  int shared_selection = -1;
  int shared_parts = 1;
  TileView shared;

  /// The same of one row, or more than there are.
  MARLIN_HOST_DEVICE int first_shared() const {
    return shared_selection >= 0 ? shared_selection : kMostTasks;
  }
};

/// A tile that a CTA multiplies.
struct ScheduledTile {
  uint32_t offset = 0;        ///< In its matrix, in units of 16 bytes.
  uint16_t k_tile = 0;        ///< Along k, of all segments.
  uint8_t unit = 0;           ///< Which of the CTA's units.
  uint8_t selection : 7 = 0;  ///< The expert's: its copy or segment.
  uint8_t side : 1 = 0;
};
static_assert(sizeof(ScheduledTile) == 8);

/// A unit of a CTA.
struct ScheduledUnit {
  uint32_t word = 0;    ///< Its first sum, of the phase's words.
  uint32_t output = 0;  ///< Its first output, of its side.
  uint8_t copy = 0;
  uint8_t side = 0;
  uint16_t warps = 0;       ///< A bit for every warp that has tiles of it.
  uint8_t first_split = 0;  ///< 1: it adds the biases.
  uint8_t first_warp = 0;   ///< With several rows: the warps that have tiles of it.
  uint8_t end_warp = 0;
  uint8_t padding = 0;
};
static_assert(sizeof(ScheduledUnit) == 16);

/// The part of a CTA in a phase: the header, then units, then tiles, of which a warp has adjacent
/// ones (TilesBefore). With several rows there is no table of tiles: a warp finds them itself
/// (TileWalk).
struct Schedule {
  int tiles = 0;
  int units = 0;
  int first_k_tile = 0;  ///< The activations that the CTA needs, in tiles of k.
  int end_k_tile = 0;
  int tiles_at = 0;  ///< Offset of the tiles from here.
  int first_unit = 0;
  int tiles_before = 0;  ///< The phase's, before the CTA's.
  int tiles_of_split = 0;
  int k_tiles = 0;
  int padding[3] = {};
};
static_assert(sizeof(Schedule) % 16 == 0);

/// An expert of a layer; the experts of each layer begin at a multiple of 16 bytes.
struct alignas(16) PersistentExpert {
  const uint8_t* gate_tiles = nullptr;  ///< Or gate and up, joined along n.
  const uint8_t* up_tiles = nullptr;
  const uint8_t* down_tiles = nullptr;
  const float* gate_bias = nullptr;  ///< [sides][n] or null.
  const float* down_bias = nullptr;
  float gate_multiplier = 1;
  float up_multiplier = 1;
  float down_multiplier = 1;
};
static_assert(sizeof(PersistentExpert) % 16 == 0, "copied 16 bytes at a time");

struct alignas(16) PersistentLayer {
  PhaseGemm gemms[kPhases];
  const float* attention_norm = nullptr;  ///< [hidden]
  const float* mlp_norm = nullptr;
  float attention_epsilon = 0;
  float mlp_epsilon = 0;
  /// [key_dim] or null; the kernel reads head_norms. Of a run's end before latent attention: null,
  /// or of queries before their second projection, gemms[kOut]; and of latents.
  const float* query_norm = nullptr;
  const float* key_norm = nullptr;
  float query_epsilon = 0;
  float key_epsilon = 0;
  int latent_features = 0;       ///< The first ones of a latent, which key_norm is for.
  const float* sinks = nullptr;  ///< [heads] or null.
  int cache_group = 0;
  int mixer_index = 0;        ///< Among the run's layers with the same kind of mixer.
  int attends = 0;            ///< 1: the mixer is attention, which runs in the kernel.
  int64_t first_element = 0;  ///< Where the layer begins in a page.
  const PersistentExpert* experts = nullptr;  ///< Null: a dense MLP.
  const float* router = nullptr;              ///< [experts, hidden]
  const float* router_bias = nullptr;
  const float* choice_bias = nullptr;
  int down_biases = 0;  ///< 1: PersistentExpert::down_bias of some experts is not null.
  /// A gated delta net's writes, then its decays: [2][value_heads][hidden]; null: there is none.
  const float* delta_rows = nullptr;
  const float* conv = nullptr;        ///< As GatedDeltaWeights.
  const float* log_decay = nullptr;   ///< [value_heads]
  const float* decay_bias = nullptr;  ///< [value_heads]
  const float* delta_norm = nullptr;  ///< [value_dim]
  float delta_epsilon = 0;
  alignas(16) float head_norms[2][kMostHeadFeatures] = {};  ///< The norms of queries and of keys.
};

/// The pages of a cache group, whose layers have the same window, or of a group of states.
struct CacheGroup {
  int window = 0;  ///< 0: none.
  void* slabs[kMostCacheSlabs] = {};
  const int32_t* block_table = nullptr;  ///< [sequences][blocks]
  int blocks = 0;
  int slab_count = 0;
  uint32_t slab_pages = 1;
  int64_t page_stride = 0;
};

/// Slots of a warp's ring that the tiles of kQkv and kOut use: the memory of the others has the
/// keys meanwhile.
inline constexpr int kLowSlots = 2;
inline constexpr int kMostSlots = 8;

/// Barriers that complete once in every layer: when the copies that they count have arrived, or
/// when copies may begin.
enum class LayerBarrier : uint8_t {
  kLayer,  ///< Its table, and the weights of attention's norm.
  kMlp,    ///< The weights of its other norm, the CTA's rows of the router, the experts' table.
  kKeys,
  kAllowed,                           ///< The first of one for every phase, whose copies it allows.
  kKeysAllowed = kAllowed + kPhases,  ///< With several rows.
};
inline constexpr int kLayerBarriers = static_cast<int>(LayerBarrier::kKeysAllowed) + 1;

/// Offsets in shared memory, in bytes: of what comes after the residual. Attention's parts share
/// the memory of the GEMMs' parts.
struct PersistentShared {
  int norms = 0;      ///< f32 [2][hidden], or of the CTA's strips of the residual: the weights of
                      ///< attention's norm and of the MLP's.
  int router = 0;     ///< f32 [the CTA's rows][hidden]
  int experts = 0;    ///< PersistentExpert [experts]
  int schedules = 0;  ///< The CTA's.
  int logits = 0;     ///< f32 [experts]
  int rotations = 0;  ///< float2 [rows][pairs]: the CTA's row, then the ones before it.
  // GEMMs:
  int activations = 0;  ///< bf16, [rows][k of the CTA's units], or [rows][kLimbCount][k] bytes.
  int limb_units = 0;   ///< f32 [tiles of k][kMostLimbRows]: what a 1 in limb 0 stands for.
  int sums = 0;         ///< f32 [units][warps][32] or [units + warps][rows][kRowSumFloats]; the
                        ///< router's scores.
  // Gated delta nets:
  int delta_rows = 0;  ///< f32 [2][hidden]: the CTA's rows of PersistentLayer::delta_rows.
  int kept = 0;        ///< f32 [kDeltaConvWidth - 1][channels]: the next row's earlier inputs.
  // In the same memory as the GEMMs' parts, attention:
  int queries = 0;  ///< bf16 [kMostGroupHeads] rows.
  int fresh = 0;    ///< bf16 [rows], as `rotations`: new keys and values.
  int inputs = 0;   ///< Or DeltaInputs.
  int ring = 0;     ///< [slots][warps]
  int keys = 0;     ///< Stages of keys and values, then sums of the warps: in upper slots.
  int state = 0;    ///< Or f32 [key_dim][kDeltaRowFloats],
  int window = 0;   ///< the convolution's earlier inputs, as `kept`,
  int conv = 0;     ///< and its weights, f32 [channels][kDeltaConvWidth].
  int bytes = 0;
};

/// Teams of warps in attention, each with a stage of keys and values: of two warps, in the hybrid
/// form of eight, and in form kGeneral of as few as memory allows.
inline constexpr int kMostTeams = kPersistentWarps / 2;
inline constexpr int kLeastTeamWarpsLog2 = 1;
inline constexpr int kMostTeamWarpsLog2 = 3;
constexpr int TeamWarpsLog2(bool hybrid) {
  return hybrid ? kMostTeamWarpsLog2 : kLeastTeamWarpsLog2;
}

/// The part of a CTA in attention: the same in all layers of a cache group.
struct AttentionPart {
  int first_key;    ///< That the token sees.
  int first_block;  ///< Blocks of kWarpKeys keys: the CTA's.
  int end_block;
  int active_splits;  ///< CTAs of a KV head that have keys.
  uint8_t* fresh;     ///< The page of the new key; null: none. The layer's part begins after it.
  const uint8_t* pages[kMostTeams];  ///< The page of every team's first block.
};

/// The part of a CTA in all gated delta nets: some features of a value head.
struct DeltaPart {
  int head = 0;  ///< Not below the number of heads: it has none.
  int key_head = 0;
  int slice = 0;       ///< Which of the head's runs of kDeltaColumns features.
  bool leads = false;  ///< The first of the key head's: it stores the queries' and keys' inputs.
  bool moves = false;  ///< The row takes part: states change.
  const float* from = nullptr;  ///< The page before the row; null: zeros.
  float* to = nullptr;          ///< The page after it; null: nothing is stored.
};

/// A gated delta net's row between the barriers of a CTA, in shared memory.
struct alignas(16) DeltaInputs {
  float queries[kMostDeltaKeys];  ///< After the convolution, without a norm.
  float keys[kMostDeltaKeys];
  float values[kDeltaColumns];
  float factors[kDeltaColumns];  ///< norm * SiLU(gate)
  float results[kDeltaColumns];
  float squares[kPersistentWarps];
  float decay;
  float write;
};

/// Small values that the threads of a CTA share.
struct PersistentScratch {
  uint32_t clock;
  uint32_t attention_clock;
  uint32_t delta_clock;
  int position;
  AttentionPart attention[kMostCacheGroups];
  DeltaPart delta;
  double router[kPersistentWarps];
  alignas(16) float squares[kPersistentWarps];
  float norm;  ///< The factor of the norm whose inputs' squares these are.
  float dots[kMostRouterRows][kPersistentWarps];
  int32_t ids[kMostTasks];    ///< The selected experts; of several rows, each once.
  float weights[kMostTasks];  ///< With several rows, [rows][kMostChosenExperts].
  int router_rows;            ///< Rows of the router that the CTA has.
  int sequence;               ///< The CTA's in attention: its row of the block tables.
  int kv_head;                ///< The CTA's; kv_heads: it has no part in attention.
  int split;                  ///< The CTA's part of the KV head's keys.
};

/// New keys, which are not read from the cache: positions.
struct NewKeys {
  int first;
  int end;
};

/// The same, of several rows.
struct alignas(128) RowsScratch {
  int row;      ///< Whose attention the CTA has a part of.
  int earlier;  ///< Rows before it of the same sequence: new tokens that it sees.
  NewKeys new_keys[kMostCacheGroups];  ///< That the row sees and the CTA has.
  float factors[kMostPersistentRows];  ///< The norm's.
  float dots[kMostRouterRows][kMostPersistentRows][kPersistentWarps];
  int active_splits[kMostCacheGroups][kMostPersistentRows];  ///< As AttentionPart's.
  int32_t chosen[kMostTasks];                                ///< [rows][kMostChosenExperts]
  int tasks;                                                 ///< Experts that any row has selected:
  uint8_t task_rows[kMostTasks];                             ///< a bit for every row,
  uint8_t places[kMostTasks][kMostPersistentRows];  ///< and the expert's place in its selection.
};

/// The beginning of shared memory: its addresses are constants of the code.
struct alignas(128) FixedShared {
  PersistentScratch scratch;
  PersistentLayer layers[2];  ///< Even and odd layers'.
  /// The rings': [full, empty][warps][slots].
  uint64_t barriers[2 * kPersistentWarps * kMostSlots];
  uint64_t layer_barriers[kLayerBarriers];  ///< LayerBarriers'.
};
static_assert(alignof(PersistentLayer) == 16 && sizeof(PersistentLayer) % 16 == 0);

/// Where the residual begins: f32 [hidden], or [rows][hidden] of the CTA's strips.
constexpr int ResidualAt(bool rows) {
  return static_cast<int>(sizeof(FixedShared) + (rows ? sizeof(RowsScratch) : 0));
}

/// Offsets in an exchange buffer, in words.
struct PersistentExchange {
  int phases[kPhases] = {};       ///< The sums of each.
  int phase_words[kPhases] = {};  ///< As many as any layer has.
  int attention = 0;              ///< [rows][kv_heads][splits][group][value_dim + 4]
  int mixed = 0;                  ///< [rows][heads][value_dim]
  int results = 0;                ///< Gated delta nets': [heads][value_dim]
  int squares = 0;                ///< [heads][kDeltaSquares]
  int logits = 0;
  int inputs[2] = {};  ///< [rows][features]: several rows' inputs of kQkv and kGates, times the
                       ///< norm's weights,
  int strips_squares[2] = {};  ///< and [rows][strips]: the sums of squares, without them.
  int arrived = 0;             ///< [CTAs]
  int words = 0;
};

/// The MoE router's options, as RouterArguments.
struct PersistentRouter {
  int experts = 0;
  int top_k = 0;
  int scoring = 0;
  int groups = 1;
  int top_groups = 1;
  int best_of_group = 2;
  bool normalize = true;
  double least_sum = 0;
  double scaling_factor = 1;
  int shared = 0;        ///< The experts after all others, which are always selected: the parts
                         ///< of the shared one.
  int shared_gated = 0;  ///< 1: times the sigmoid of the router's last row.

  MARLIN_HOST_DEVICE int rows() const { return experts + shared_gated; }
  MARLIN_HOST_DEVICE int table() const { return experts + shared; }
  MARLIN_HOST_DEVICE int selected() const { return top_k + shared; }

  bool operator==(const PersistentRouter&) const = default;
};

/// Where the columns of a part of a gated delta net's inputs begin in the projections.
struct HeadColumns {
  int first = 0;
  int of_key_head = 0;

  bool operator==(const HeadColumns&) const = default;
};

/// The shape of all gated delta nets.
struct PersistentDelta {
  int key_heads = 0;
  int value_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int value_log2 = 0;  ///< log2 of value_dim.
  int slices = 1;      ///< CTAs of a value head.
  int group = 1;       ///< Value heads of a key head.
  HeadColumns queries = {};
  HeadColumns keys = {};
  HeadColumns values = {};
  HeadColumns gates = {};
  HeadColumns writes = {};  ///< Rows of PersistentLayer::delta_rows.
  HeadColumns decays = {};
  int states = 0;  ///< The cache group.

  /// The convolution's channels, and a CTA's of them.
  MARLIN_HOST_DEVICE int channels() const {
    return 2 * key_heads * key_dim + value_heads * value_dim;
  }
  MARLIN_HOST_DEVICE int own_channels() const { return 2 * key_dim + kDeltaColumns; }

  bool operator==(const PersistentDelta&) const = default;
};

inline constexpr int kClocks = 3;

/// Bytes that the operations after a run read, in their order: they are requested into L2 at its
/// end. Both are multiples of 16.
struct AheadRange {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};
inline constexpr int kMostAhead = 3;
/// All together: a part of L2.
inline constexpr int64_t kMostAheadBytes = int64_t{16} << 20;

struct PersistentArguments {
  const PersistentLayer* layers = nullptr;
  int layer_count = 0;
  /// The phases that run, over all layers: a run may begin after the first layer's mixer and end
  /// before the last one's.
  int first_phase = 0;
  int end_phase = 0;
  float* hidden = nullptr;  ///< [rows][features]: the residual, in and out.
  int features = 0;
  int heads = 0;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int group = 1;                              ///< Query heads of a KV head.
  int attention_splits = 1;                   ///< CTAs of a KV head.
  int team_warps_log2 = kLeastTeamWarpsLog2;  ///< Warps of a team in attention.
  float scale = 1;
  const float* frequencies = nullptr;
  int pairs = 0;
  float rotary_factor = 1;
  bool interleaved = false;
  bool norms_after_rotary = false;  ///< The norms of queries and keys.
  PersistentForm form = PersistentForm::kToken;
  int rows = 1;
  CodeKind kind = CodeKind::kFp4;  ///< All weights'.
  int activation_stride = 0;       ///< Bytes of a row's activations.
  int limb_stride = 0;             ///< Bytes of one of their limbs; 0: they are bf16.
  /// Factor of activations in bf16: a power of two, by which the finished sums are divided
  /// (GroupSums).
  float activation_factor = 1;
  bool output_gate = false;  ///< As AttentionStep.
  unsigned key_groups = 0;   ///< A bit for every cache group of keys.
  int attention_layers = 0;  ///< In the run.
  int delta_layers = 0;
  int cache_bytes = 2;  ///< Bytes of an element of the KV cache: bf16, or 1 for e4m3.
  GateView gate;
  PersistentRouter router;
  PersistentDelta delta;
  const int32_t* moves = nullptr;  ///< Negative: the row changes no state.
  /// The first layer's mixer's results, if the run begins after it.
  const void* mixed = nullptr;  ///< [rows][inputs of its kOut]
  bool mixed_is_bf16 = false;
  /// The last layer's projections, if the run ends after them, and its latents: [rows] of each.
  float* projected = nullptr;
  float* latent = nullptr;
  AheadRange ahead[kMostAhead];
  const uint8_t* schedules = nullptr;  ///< [CTAs][schedule_bytes]
  int schedule_bytes = 0;
  int slots = 0;  ///< In a warp's ring.
  int slot_bytes = 0;
  PersistentShared shared;
  PersistentExchange exchange;
  uint32_t* words = nullptr;  ///< Two exchange buffers.
  /// [kClocks]: layers that have run, over all launches; those with attention; with delta rules.
  uint32_t* clock = nullptr;
  const int32_t* position = nullptr;  ///< [rows]
  CacheGroup groups[kMostCacheGroups];
  ErrorView errors;
  // With several rows, whose sequences may have several each:
  const int32_t* first_rows = nullptr;  ///< [sequences + 1]
  int sequences = 0;
};
static_assert(sizeof(PersistentArguments) < 4000, "kernel parameters have 4 KB");

/// The persistent kernels (plan/instances.def); their parameter is a PersistentArguments.
struct PersistentKernels {
  struct Variant {
    /// kHybrid: layers mix by gated delta nets or, as the first and the last one, elsewhere.
    /// kBetween, kBetweenRows: the first one elsewhere, and only projections follow. Else all have
    /// attention.
    PersistentForm form;
    bool limbs = false;  ///< PersistentArguments::limb_stride is not 0.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
