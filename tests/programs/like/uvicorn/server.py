"""A server that is ready at once and serves for ever."""

import asyncio


class Server:
    started = False

    async def startup(self) -> None:
        self.started = True

    async def serve(self) -> None:
        await self.startup()
        await asyncio.Event().wait()
