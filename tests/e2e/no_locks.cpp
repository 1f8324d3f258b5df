// Preloaded into a program: every file system is one that cannot lock files.
#include <sys/file.h>

#include <cerrno>

extern "C" int flock(int /*descriptor*/, int /*operation*/) {
  errno = ENOLCK;
  return -1;
}
