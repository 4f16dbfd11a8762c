#pragma once

using IOSurfaceRef = struct __IOSurface*;
