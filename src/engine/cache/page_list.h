// Pages in the order in which they were added, from which any can be removed. Neither allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace marlin {

class PageList {
 public:
  /// Makes room for pages with lower numbers than `pages`.
  void Resize(size_t pages) { links_.resize(pages); }

  int64_t count() const { return count_; }
  /// The page that was added first; -1: there is none.
  int32_t oldest() const { return oldest_; }
  /// When a page was added.
  int64_t TimeOf(int32_t page) const { return links_[static_cast<size_t>(page)].time; }

  void Add(int32_t page, int64_t time) {
    LinksOf(page) = {newest_, -1, time};
    (newest_ < 0 ? oldest_ : LinksOf(newest_).newer) = page;
    newest_ = page;
    ++count_;
  }
  void Remove(int32_t page) {
    const Links& links = LinksOf(page);
    (links.older < 0 ? oldest_ : LinksOf(links.older).newer) = links.newer;
    (links.newer < 0 ? newest_ : LinksOf(links.newer).older) = links.older;
    --count_;
  }

 private:
  struct Links {
    int32_t older = -1;
    int32_t newer = -1;
    int64_t time = 0;
  };
  Links& LinksOf(int32_t page) { return links_[static_cast<size_t>(page)]; }

  std::vector<Links> links_;
  int32_t oldest_ = -1;
  int32_t newest_ = -1;
  int64_t count_ = 0;
};

}  // namespace marlin
