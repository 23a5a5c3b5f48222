/* The first and only process of the emulated machine: runs /program with the arguments in /arguments (each ended by a
 * zero byte), its output on the second serial line, its status on the first, then switches the machine off. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static char text[65536];
static char *arguments[256] = {"/program"};

int main(void) {
  mkdir("/dev", 0755);
  mkdir("/proc", 0755);
  mkdir("/tmp", 01777);
  mount("dev", "/dev", "devtmpfs", 0, 0);
  mount("proc", "/proc", "proc", 0, 0);
  mount("tmp", "/tmp", "tmpfs", 0, 0);
  int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY), output = open("/dev/ttyS1", O_RDWR | O_NOCTTY);
  struct termios settings;
  tcgetattr(output, &settings);
  cfmakeraw(&settings);
  settings.c_cflag |= CLOCAL;
  tcsetattr(output, TCSANOW, &settings);

  int file = open("/arguments", O_RDONLY), count = 1;
  ssize_t length = read(file, text, sizeof text - 1);
  for (ssize_t at = 0; at < length && count < 255; at += strlen(text + at) + 1) arguments[count++] = text + at;

  pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_RDONLY), 0);
    dup2(output, 1);
    dup2(output, 2);
    char *environment[] = {"PATH=/", "HOME=/tmp", "TMPDIR=/tmp", 0};
    execve("/program", arguments, environment);
    perror("execve");
    _exit(127);
  }
  int status = 0;
  while (wait(&status) != child) {
  }
  tcdrain(output);
  dprintf(console, "\n@@EXIT %d@@\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  tcdrain(console);
  /* Bochs ends when it is told so on this port. */
  if (ioperm(0x8900, 1, 1) == 0)
    for (const char *letter = "Shutdown"; *letter; letter++) outb(*letter, 0x8900);
  reboot(RB_POWER_OFF);
  for (;;) pause();
}
